"""`usage` on a cluster whose Slurm is played, and from the runs on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs.usage import usage_of_cluster, usage_of_runs
from clusterctl.scheduler.base import AccountingAwayError
from clusterctl.scheduler.slurm.usage import UsageGrouping
from clusterctl.state.ledger import note_runs_folder
from tests.support.messages import refused
from tests.support.played.cluster import PlayedCluster

HOUR = 3600


def add(cluster: PlayedCluster, job_id: str, **fields: Any) -> None:
    usual = {
        "state": "COMPLETED",
        "dir": "/x",
        "name": "train",
        "comment": "",
        "reason": "",
        "code": 0,
        "signal": 0,
        "forgotten": True,
    }
    with cluster.state() as state:
        state["jobs"][job_id] = {**usual, **fields}


def test_usage_is_that_of_all_users_and_attempts(cluster: PlayedCluster) -> None:
    now = int(time.time())
    tres = {"AllocTRES": "billing=4,cpu=4,gres/gpu=2,mem=8G,node=2", "nodes": "n[1-2]"}
    attempt = {
        "state": "REQUEUED", "dir": "/x", "name": "train", "comment": "", "code": 0, "signal": 0,
        "start": now - 6 * HOUR, "end": now - 5 * HOUR, "submit": now - 7 * HOUR, **tres,
    }  # fmt: skip
    times = {"submit": now - 7 * HOUR, "start": now - 4 * HOUR, "end": now - 2 * HOUR}
    add(cluster, "1", attempts=[attempt], **times, **tres)
    add(cluster, "2", user="bob", start=now - HOUR, end=now, submit=now - HOUR)
    add(cluster, "3", start=now - 99 * HOUR, end=now - 98 * HOUR, submit=now - 99 * HOUR)
    add(cluster, "4", user="bob", state="PENDING", submit=now - HOUR)
    usage = usage_of_cluster(cluster.session(), [UsageGrouping.USER], "24h")
    rows = {row.key[0]: row for row in usage.rows}
    assert (usage.source, usage.unread, rows.keys()) == ("accounting", 0, {"hpc", "bob"})
    hpc, bob = rows["hpc"], rows["bob"]
    assert (hpc.jobs, hpc.node_hours, hpc.cpu_hours, hpc.gpu_hours) == (1, 6, 12, 6)
    assert bob.node_hours == pytest.approx(1, abs=0.01)


def test_usage_needs_an_answer_of_the_accounting(cluster: PlayedCluster) -> None:
    with cluster.state() as state:
        state["accounting_away"] = True
    with refused("accounting-away", AccountingAwayError):
        usage_of_cluster(cluster.session(), [UsageGrouping.USER], "24h")


def test_usage_of_runs_names_a_run_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    run = tmp_path / "runs" / "demo-1-train"
    run.mkdir(parents=True)
    for name in ("run.json", "SHA256SUMS", "environment.json"):
        (run / name).write_text("{")
    note_runs_folder(tmp_path / "runs")
    usage = usage_of_runs([UsageGrouping.USER], "30d")
    assert usage.rows == ()
    assert [str(run) in note for note in usage.notes] == [True]
