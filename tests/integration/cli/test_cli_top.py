"""The command `top`, on a cluster whose Slurm is a double."""

from __future__ import annotations

import json

import pytest

from clusterctl.cli import jobs, top
from clusterctl.cli.all_clusters import ClusterAnswers
from clusterctl.cli.output import Screen
from clusterctl.errors import NotUpError, UsageError
from clusterctl.jobs.top import watching
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.messages import refused, shows
from tests.support.played.cluster import submitted


def test_job_is_shown_in_text_and_json(played_session, cluster, tmp_path, capsys) -> None:
    job_id = submitted(played_session, tmp_path, "echo begun; sleep 60")
    assert top.top(Screen(json=True, color=False), [job_id]) is None
    (found,) = json.loads(capsys.readouterr().out)["clusters"]
    assert set(found) == {"cluster", "asked_s", "pace_s", "nodes", "partitions", "jobs", "unread"}
    (job,) = found["jobs"]
    assert job["job_id"] == job_id
    assert set(job["use"]) == {
        "id",
        "nodes",
        "ranks",
        "silent",
        "progress",
        "hang",
        "log",
        "alarms",
    }
    # A pipe without IDs gets the state once, as with --once.
    for words in ({"ids": [job_id], "once": True}, {}):
        top.top(Screen(json=False, color=False), **words)
        assert f"job {job_id} " in capsys.readouterr().out


def test_attached_site_is_asked_at_its_pace_and_the_screen_tells_it(
    played_session, cluster, tmp_path, monkeypatch, set_clock
) -> None:
    """While the only job waits, Slurm is asked every 30 s, and the job's folder at each look."""
    inventory = Workspace.of("demo").inventory
    inventory.write_text(json.dumps({**json.loads(inventory.read_text()), "is_foreign": True}))
    gpu = {"Partition": "gpu", "Available": "up", "Time": "1-00:00:00", "NodeAIOT": "60/3/1/64"}
    with cluster.state() as state:
        state["hold"] = True
        state["partitions"] = [gpu]
    job_id = submitted(played_session, tmp_path, "true")
    cluster.change(job_id, reason="Priority")
    now = 1000.0
    set_clock(Clock(now=lambda: now))
    with watching(Workspace.of("demo")) as watch:
        asked = [cluster.calls(command) for command in ("squeue", "sinfo")]
        for _ in range(12):
            moment = watch.look()
            now += 10
        calls = [cluster.calls(command) for command in ("squeue", "sinfo")]
    assert [after - before for before, after in zip(asked, calls, strict=True)] == [4, 4]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    looks = ClusterAnswers({"demo": moment}, {})
    view = top.TopView().moved(looks.found)
    first, *lines = top._screenful(Screen(json=False, color=False), looks, view, "")
    assert first.partition("Slurm")[2] == " was asked 20 s ago, at most every 10 s on average"
    assert lines == [
        "",
        "PARTITION  STATE  LIMIT       NODES  IDLE  ALLOCATED  OTHER",
        "gpu        up     1-00:00:00     64     3         60      1",
        "",
        "JOB  NAME  STATE    REASON",
        "1    mine  PENDING  Priority",
        "",
        "job 1 (mine): PENDING (Priority)",
        "q: quit   ↑ ↓: choose a job   space: look now",
    ]


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


def test_status_of_all_clusters_names_those_that_do_not_answer(
    played_session, cluster, tmp_path, capsys
) -> None:
    far = Workspace.of("far")
    far.create()
    far.inventory.write_text("{")
    job_id = submitted(played_session, tmp_path, "sleep 60")
    everything = Screen(json=True, color=False, cluster="all")
    jobs.status(everything)
    answer = json.loads(capsys.readouterr().out)
    assert [each["cluster"] for each in answer["clusters"]] == ["demo"]
    assert [each["cluster"] for each in answer["unanswered"]] == ["far"]
    jobs.status(Screen(json=False, color=False, cluster="all"))
    shown, notes = capsys.readouterr()
    assert [line.split()[0] for line in shown.splitlines() if line] == [
        "CLUSTER",
        "demo",
        "JOB",
        f"demo/{job_id}",
    ]
    assert shows(notes, "cluster-missing")


def test_jobs_of_all_clusters_are_one_list_whose_ids_name_the_cluster(
    played_session, cluster, tmp_path, capsys
) -> None:
    ids = [submitted(played_session, tmp_path, "true", name) for name in ("first", "second")]
    jobs.jobs(Screen(json=True, color=False, cluster="all"))
    answer = json.loads(capsys.readouterr().out)
    found = [(each["cluster"], each["job_id"]) for each in answer["jobs"]]
    assert found == [("demo", job_id) for job_id in reversed(ids)]
    jobs.jobs(Screen(json=False, color=False, cluster="all"))
    shown = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in shown[1:]} == {f"demo/{job_id}" for job_id in ids}
