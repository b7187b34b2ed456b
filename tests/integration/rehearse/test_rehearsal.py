"""Jobs and clusters that can't be rehearsed, and the job that is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import RehearsalError, UsageError
from clusterctl.rehearse.observation import Observation
from clusterctl.rehearse.rehearsal import (
    Rehearsal,
    job_to_rehearse,
    reject_other_clusters,
)
from clusterctl.rehearse.verdict import Fault, FaultResult, RunWithoutFault, Verdict
from clusterctl.scheduler.session import Session
from clusterctl.spec.models import PROVIDERS
from tests.support.messages import refused


def test_rehearsed_job_restarts_and_ends_hangs() -> None:
    job = job_to_rehearse("train", {"nodes": 2, "args": ("--epochs", "2")})
    assert (job.requeue, job.hang, job.nodes, job.args) == (True, "end@10", 2, ("--epochs", "2"))


@pytest.mark.parametrize(
    "text", ["job: job.sh\nvariants: {a: {nodes: 1}, b: {nodes: 2}}\n", "job: job.sh\narray: 0-3\n"]
)
def test_rehearse_of_several_jobs_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "jobs.yaml").write_text(text)
    with refused("option-invalid/rehearsal", UsageError):
        job_to_rehearse(str(tmp_path / "jobs.yaml"), {})


def test_rehearse_on_a_cluster_that_is_not_local_is_refused(session: Session) -> None:
    reject_other_clusters(session)
    other: Any = SimpleNamespace(spec=SimpleNamespace(provider=PROVIDERS["gcp"]))
    with refused("unsupported/rehearsal", UsageError):
        reject_other_clusters(other)


def rehearsal(*verdicts: Verdict) -> Rehearsal:
    job = RunWithoutFault(Observation("1", "/x"), {"checkpoints": {}, "outputs": {}, "lines": {}})
    trials = tuple(
        FaultResult(fault=fault, verdict=verdict, job_id="2")
        for fault, verdict in zip(Fault, verdicts, strict=False)
    )
    return Rehearsal(name="train", undisturbed=job, trials=trials, mtbf_s=1)


def test_rehearse_has_a_failure_for_each_fault_not_survived() -> None:
    rehearsal(Verdict.SURVIVES).raise_unless_survived()
    with refused("job-failed/rehearsal", RehearsalError) as caught:
        rehearsal(Verdict.SURVIVES, Verdict.HANGS, Verdict.LOST).raise_unless_survived()
    assert caught.value.exit_code == 7
    assert [failure.cause.partition(":")[0] for failure in caught.value.failures] == [
        "rank-frozen",
        "time-limit",
    ]
    assert [fault["verdict"] for fault in caught.value.answer["faults"]] == [
        "survives",
        "hangs",
        "lost",
    ]
