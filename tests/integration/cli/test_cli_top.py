"""The command `top`, on a cluster whose Slurm is a double."""

from __future__ import annotations

import json

import pytest

from clusterctl.cli import top
from clusterctl.cli.output import Screen
from clusterctl.errors import NotUpError, UsageError
from tests.support.messages import refused
from tests.support.played.cluster import submitted


def test_job_is_shown_in_text_and_json(played_session, cluster, tmp_path, capsys) -> None:
    job_id = submitted(played_session, tmp_path, "echo begun; sleep 60")
    assert top.top(Screen(json=True, color=False), [job_id]) is None
    (found,) = json.loads(capsys.readouterr().out)["clusters"]
    assert set(found) == {"cluster", "asked_s", "pace_s", "nodes", "partitions", "jobs", "unread"}
    (job,) = found["jobs"]
    assert job["job_id"] == job_id
    assert set(job["use"]) == {"id", "nodes", "ranks", "silent", "progress", "hang", "log"}
    top.top(Screen(json=False, color=False), [job_id], once=True)
    assert f"job {job_id} " in capsys.readouterr().out


def test_watch_of_given_jobs_ends_with_them(played_session, cluster, tmp_path, capsys) -> None:
    job_id = submitted(played_session, tmp_path, "true")
    cluster.wait_until_ended(job_id)
    top.top(Screen(json=False, color=False), [job_id])
    assert "no job of yours is running" in capsys.readouterr().out


def test_all_clusters_have_no_job_ids_in_common(
    played_session, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    everything = Screen(json=True, color=False, cluster="all")
    with refused("options-exclusive", UsageError):
        top.top(everything, ["7"])
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "empty"))
    with refused("not-up", NotUpError):
        top.top(everything)


def test_all_clusters_are_shown(played_session, capsys) -> None:
    top.top(Screen(json=True, color=False, cluster="all"))
    (found,) = json.loads(capsys.readouterr().out)["clusters"]
    assert found["cluster"] == "demo"
