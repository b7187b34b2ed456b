"""`usage` on a cluster whose Slurm is played, and from the runs on this machine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs.saved_usage import save_usage
from clusterctl.runs.usage import (
    removed_usages,
    report_usage,
    usage_of_cluster,
    usage_of_runs,
    usage_since,
)
from clusterctl.scheduler.base import AccountingAwayError
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.slurm.usage import UsageGrouping, UsageReport
from clusterctl.state.ledger import note_runs_folder
from clusterctl.state.workspace import Workspace
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


def took_down(cluster: PlayedCluster, cluster_id: str, name: str = "demo") -> None:
    """Write the usage of the cluster, as `down` does."""
    session = cluster.session()
    inventory = replace(session.inventory, cluster_id=cluster_id, cluster=name)
    save_usage(cluster_id, usage_since(replace(session, site=site_of(inventory)), 0))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of all workspaces."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def used(cluster: PlayedCluster, home: Path) -> PlayedCluster:
    """A cluster with a job of an hour."""
    now = int(time.time())
    add(cluster, "1", user="bob", start=now - 2 * HOUR, end=now - HOUR, submit=now - 2 * HOUR)
    return cluster


def hours_of(usage: UsageReport) -> dict[str, tuple[int, float]]:
    return {row.key[0]: (row.jobs, row.node_hours) for row in usage.rows}


def test_usage_of_removed_clusters_is_summed(used: PlayedCluster, home: Path) -> None:
    """Two clusters of a name, one after the other, had a job 1 each."""
    took_down(used, "aaaaaa")
    took_down(used, "bbbbbb")
    took_down(used, "cccccc", "lab-2")
    # A `down` that was interrupted does it again.
    took_down(used, "cccccc", "lab-2")
    by = [UsageGrouping.CLUSTER]
    report = report_usage(removed_usages(), by, "24h")
    assert hours_of(report) == {"demo": (2, 2), "lab-2": (1, 1)}
    assert (report.source, report.total.jobs) == ("accounting", 3)
    assert hours_of(report_usage(removed_usages("lab-2"), by, "24h")) == {"lab-2": (1, 1)}
    assert hours_of(usage_of_cluster(used.session(), by, "24h")) == {"demo": (3, 3)}
    modes = {path.stat().st_mode & 0o777 for path in (home / ".usage").iterdir()}
    assert modes == {0o600}


def test_cluster_that_is_up_again_after_an_interrupted_down_counts_once(
    used: PlayedCluster, home: Path
) -> None:
    took_down(used, "aaaaaa")
    workspace = Workspace(home / "demo")
    workspace.create()
    inventory = used.session().inventory
    workspace.inventory.write_text(replace(inventory, cluster_id="aaaaaa").text)
    assert removed_usages() == []


def test_damaged_lines_of_saved_usage_are_counted(used: PlayedCluster, home: Path) -> None:
    took_down(used, "aaaaaa")
    (path,) = (home / ".usage").iterdir()
    rows = path.read_text()
    damaged = [
        "{",
        '{"job": "x"}',
        '{"job": 7}',
        rows.splitlines()[1].replace('"nodes":1', '"nodes":"1"'),
    ]
    path.write_text(rows + "\n".join(damaged) + "\n")
    report = report_usage(removed_usages(), [UsageGrouping.USER], "24h")
    assert (hours_of(report), report.unread) == ({"bob": (1, 1)}, 4)
