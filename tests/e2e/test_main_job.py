"""The main workflow: a cluster, a training on two nodes, the collected run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, records

pytestmark = pytest.mark.platform("real", "debian-13")

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

_TRAIN = ("--epochs", "8", "--precision", "fp64")  # sums that any number of ranks gives alike


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> dict[str, Any]:
    """A completed training on two nodes."""
    answer = cluster.json("submit", "train", "--nodes", "2", "--wait", "--", *_TRAIN)
    assert answer["ok"]
    return dict(answer)


@pytest.fixture(scope="module")
def run(cluster: Cluster, job: dict[str, Any]) -> Path:
    return cluster.run_of(job["job_id"])


def only(metrics: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (record,) = (record for record in metrics if record["kind"] == kind)
    return record


@pytest.mark.story
def test_up_prints_and_journals_its_phases(cluster: Cluster) -> None:
    up = cluster.raised
    assert up["ok"]
    assert up["ready"]
    phases = [
        "plan_changes",
        "prepare_image",
        "prepare_template",
        "provision",
        "probe",
        "converge",
        "verify",
    ]
    assert [phase["phase"] for phase in up["phases"]] == phases
    assert all(phase["seconds"] >= 0 for phase in up["phases"])
    assert up["probed"] == up["nodes"] == [f"{cluster.name}-train-1", f"{cluster.name}-train-2"]
    journal = records(cluster.workspace / "journal.jsonl")[: len(phases)]
    assert [entry["phase"] for entry in journal] == phases
    assert all(entry["ok"] and entry["verb"] == "up" for entry in journal)


@pytest.mark.story
def test_training_on_two_nodes_ends_with_equal_parameters(cluster: Cluster, run: Path) -> None:
    """Both ranks end with the same parameters, and the model is good."""
    start = only(records(run / "metrics.jsonl"), "run")
    assert start["world_size"] == 2
    assert [rank["host"] for rank in start["ranks"]] == cluster.raised["nodes"]
    first, second = (set(rank["cores"]) for rank in start["ranks"])
    assert first
    assert second
    if (os.cpu_count() or 1) > 1:
        assert not first & second
    result = only(records(run / "metrics.jsonl"), "result")
    assert len(result["param_hashes"]) == 2
    assert len(set(result["param_hashes"])) == 1
    assert result["accuracy"] >= 0.95


def test_two_ranks_end_with_the_loss_of_one(cluster: Cluster, run: Path) -> None:
    alone = cluster.json("submit", "train", "--nodes", "1", "--wait", "--", *_TRAIN)
    other = cluster.run_of(alone["job_id"])
    losses = [
        [
            record["loss"]
            for record in records(folder / "metrics.jsonl")
            if record["kind"] == "iteration"
        ]
        for folder in (run, other)
    ]
    assert only(records(other / "metrics.jsonl"), "run")["world_size"] == 1
    assert len(losses[0]) > 50
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.story
def test_collected_run_has_all_files(cluster: Cluster, run: Path, job: dict[str, Any]) -> None:
    assert run.name == f"{cluster.name}-{job['job_id']}-train"
    assert run.parent == cluster.runner.cwd / "runs"
    for name in ("run.json", "job.sbatch", "spec.yaml", "stdout.log", "stderr.log", "metrics.jsonl",
                 "sacct.json", "environment.json", "SHA256SUMS", "report.html"):  # fmt: skip
        assert (run / name).is_file(), name
    assert "test accuracy" in (run / "stdout.log").read_text()
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["final"], record["cluster"]) == (
        "COMPLETED",
        True,
        cluster.name,
    )
    assert (run / "spec.yaml").read_text() == (cluster.workspace / "spec.yaml").read_text()


def test_collected_run_has_telemetry_of_every_node(cluster: Cluster, run: Path) -> None:
    for node in cluster.raised["nodes"]:
        first, *_, last = records(run / "telemetry" / f"{node}.jsonl")
        assert (first["kind"], first["host"]) == ("host", node)
        assert {"time", "cpu_percent", "memory_used_mib"} <= set(last)
    assert "clusterctl" in (run / "environment.json").read_text()


def test_slurm_accounts_for_the_job(cluster: Cluster, run: Path, job: dict[str, Any]) -> None:
    fields = "JobID,State,User,Account,Partition,NNodes,NTasks"
    out = cluster.ssh(f"{cluster.name}-ctl", f"sacct -nP -j {job['job_id']} -o {fields}")
    whole, *steps = (line.split("|") for line in out.splitlines())
    assert whole[:3] == [job["job_id"], "COMPLETED", cluster.user]
    assert whole[4:6] == ["train", "2"]
    assert any(row[0].endswith(".0") and row[6] == "2" for row in steps)
    assert job["job_id"] in (run / "sacct.json").read_text()


def test_usage_and_ledger_count_the_job(cluster: Cluster, run: Path) -> None:
    """The ledger sums to the time from the submission to the end, which Slurm knows."""
    usage = cluster.json("usage", "--by", "partition,month")
    assert usage["source"] == "accounting"
    assert usage["sum"]["jobs"] >= 1
    assert usage["sum"]["node_hours"] > 0
    record = json.loads((run / "run.json").read_text())
    (task,) = record["tasks"]
    whole = task["end_time"] - record["submit_time"]
    assert sum(task["time_use"].values()) == pytest.approx(whole, abs=0.01)
    assert {"start-up", "useful", "evaluation"} <= task["time_use"].keys()


@pytest.mark.story
def test_up_again_changes_nothing_and_proves_again(cluster: Cluster) -> None:
    hosts = len(cluster.raised["nodes"]) + 1
    for argv, note in (
        (["up"], f"unchanged: {hosts} hosts checked"),
        (["up", "--reconfigure"], "0 changed"),
    ):
        again = cluster.json(*argv)
        assert again["probed"] == again["nodes"]
        configure = next(phase for phase in again["phases"] if phase["phase"] == "converge")
        assert note in configure["note"]


def test_dry_run_works_by_hand_with_plain_sbatch(cluster: Cluster) -> None:
    script = cluster("submit", "train", "--nodes", "2", "--dry-run", "--", "--epochs", "1").stdout
    assert script.startswith("#!/bin/bash\n")
    controller = f"{cluster.name}-ctl"
    user = cluster.user
    submit = (
        "mkdir -p by-hand && cd by-hand && cat > job.sbatch && sbatch --wait --parsable job.sbatch"
    )
    argv = ["ssh", "-F", cluster.workspace / "ssh_config", "-l", user, controller, submit]
    done = subprocess.run(
        argv, input=script, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done
    assert "test accuracy" in cluster.ssh(controller, "cat by-hand/stdout.log", user=user)


def test_files_written_by_clusterctl_are_private(cluster: Cluster) -> None:
    for path in [cluster.workspace, *cluster.workspace.rglob("*")]:
        assert path.lstat().st_mode & 0o077 == 0, path
