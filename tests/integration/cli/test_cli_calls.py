"""How often verbs ask Slurm: a site's sacct may take half a minute, and a site counts the calls of
its users.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.base import comment_of
from clusterctl.scheduler.session import Session
from tests.support.played.cluster import COMMANDS, PlayedCluster, finished

Answer = Callable[..., dict[str, Any]]
Calls = Callable[..., tuple[dict[str, int], dict[str, Any]]]


@pytest.fixture
def calls(cluster: PlayedCluster, answer: Answer) -> Calls:
    """`calls("jobs", "1")`: how often a verb calls each command of Slurm, and its answer."""

    def count(*words: str, rc: int = 0) -> tuple[dict[str, int], dict[str, Any]]:
        before = {command: cluster.calls(command) for command in COMMANDS}
        answered = answer(*words, rc=rc)
        made = {command: cluster.calls(command) - before[command] for command in COMMANDS}
        return {command: number for command, number in made.items() if number}, answered

    return count


def ended(session: Session, cluster: PlayedCluster, folder: Path, body: str) -> str:
    """The ID of an ended job that the queue has forgotten."""
    job_id = finished(session, cluster, folder, body)
    cluster.change(job_id, forgotten=True)
    return job_id


def repeated(session: Session, cluster: PlayedCluster, job_id: str, count: int) -> None:
    """Repeat an ended job, each time with an ID and a folder of its own."""
    entry = session.ledger.find(job_id)
    assert entry is not None
    folder = Path(entry.remote_dir or "")
    for _ in range(count):
        token = secrets.token_hex(4)
        with cluster.state() as state:
            own_id = str(state["next"])
            state["next"] += 1
            job = {**state["jobs"][job_id], "comment": comment_of(token)}
            job["dir"] = str(folder.with_name(token))
            state["jobs"][own_id] = job
        shutil.copytree(folder, folder.with_name(token), symlinks=True)
        session.ledger.keep(token, session.ledger.kept(entry.token))
        own = replace(entry, token=token, job_id=own_id, remote_dir=str(folder.with_name(token)))
        session.ledger.add(own)


def test_collect_of_60_jobs_asks_once_for_all(played_session, cluster, tmp_path, calls):
    """Of sacct, it asks once for the states with the steps, and once for the records as JSON."""
    for body, count in (("echo x >result.txt", 39), ("exit 3", 19)):
        job_id = ended(played_session, cluster, tmp_path, body)
        repeated(played_session, cluster, job_id, count)
    made, answered = calls("collect", "--everywhere")
    assert made == {"squeue": 1, "sacct": 2, "sinfo": 1}
    runs = [Path(run["dir"]) for run in answered["runs"]]
    assert len(runs) == 60
    assert all(f'"job_id": {run.name.split("-")[1]}' in (run / "sacct.json").read_text()
               for run in runs)  # fmt: skip
    states = [run["state"] for run in answered["runs"]]
    assert (states.count("COMPLETED"), states.count("FAILED")) == (40, 20)
    assert calls("collect", "--everywhere") == ({}, {**answered, "runs": []})


@pytest.mark.parametrize("body", ["true", "exit 3"])
def test_verbs_on_an_ended_job_ask_slurm_until_its_end_is_known(
    played_session, cluster, tmp_path, calls, body
):
    job_id = ended(played_session, cluster, tmp_path, body)
    rc = 0 if body == "true" else 4
    # Nothing is known but the submission. The steps of a job that failed are asked for once.
    first, _ = calls("logs", job_id)
    assert first == {"squeue": 1, "sacct": 1 + (rc > 0)}
    assert calls("wait", job_id, rc=rc)[0] == {"squeue": 1, "sacct": 1}
    # `wait` has recorded the end.
    assert calls("logs", job_id)[0] == {}
    asked, shown = calls("jobs", job_id)
    assert asked == {"squeue": 1, "sacct": 1}
    assert calls("collect", job_id)[0] == {"squeue": 1, "sacct": 2, "sinfo": 1}
    # The record of the run has all that Slurm told.
    made, again = calls("jobs", job_id)
    (then,), (now,) = shown["jobs"], again["jobs"]
    later = {"run_dir": now["run_dir"], "attempts": now["attempts"], "files": now["files"]}
    assert (made, {**then, **later}) == ({}, now)
    assert os.path.isdir(now["run_dir"])
    assert calls("logs", job_id)[0] == calls("collect", job_id)[0] == {}


def test_jobs_asks_twice_for_the_queue_and_once_for_what_has_left_it(
    played_session, cluster, tmp_path, calls
):
    job_id = ended(played_session, cluster, tmp_path, "true")
    repeated(played_session, cluster, job_id, 9)
    made, answered = calls("jobs")
    assert (made, len(answered["jobs"])) == ({"squeue": 2, "sacct": 1}, 10)


@pytest.mark.parametrize("body", ["true", "exit 3"])
def test_job_that_somebody_started_again_is_asked_for(
    played_session, cluster, tmp_path, calls, body
):
    """Its record on the cluster has a start after the end that Slurm has told."""
    job_id = ended(played_session, cluster, tmp_path, body)
    calls("wait", job_id, rc=0 if body == "true" else 4)
    events = Path(cluster.job(job_id)["dir"], "job.events")
    start = json.loads(events.read_text().splitlines()[0])
    later = {"time": start["time"] + 60, "restarts": 1}
    events.write_text(f"{events.read_text()}{json.dumps({**start, **later})}\n")
    cluster.change(job_id, state="RUNNING", forgotten=False)
    assert calls("logs", job_id)[0] == {"squeue": 1}
