"""What a partition gives a job, as the scheduler counts it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.script import partition_of
from clusterctl.spec.job import JobSpec
from clusterctl.state.facts import PartitionFacts
from tests.support.inventories import facts_with
from tests.support.messages import refused


@pytest.mark.parametrize(
    ("scheduler", "time", "fits"),
    [("slurm", "2m", True), ("slurm", "121s", False), ("none", "90s", True), ("none", "2m", False)],
)
def test_slurm_rounds_times_up_to_minutes_and_mpirun_does_not(scheduler: str, time: str, fits: bool) -> None:
    facts = facts_with(PartitionFacts("train", ("n1",), max_time=90), has_slurm=scheduler == "slurm")
    with nullcontext() if fits else refused("time-above-limit", UsageError, "partition train", "1m30s"):
        partition_of(facts, JobSpec(name="train", bundled="train", time=time))
