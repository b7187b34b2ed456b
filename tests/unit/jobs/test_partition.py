"""What a partition gives a job, as the scheduler counts it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.script import partition_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from tests.support.messages import refused


@pytest.mark.parametrize(
    ("scheduler", "time", "fits"),
    [("slurm", "2m", True), ("slurm", "121s", False), ("none", "90s", True), ("none", "2m", False)],
)
def test_slurm_rounds_times_up_to_minutes_and_mpirun_does_not(scheduler: str, time: str, fits: bool) -> None:
    spec = ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "d",
            "partitions": [{"name": "train", "nodes": 1, "max_time": "90s"}],
            "users": [{"name": "ada", "uid": 10000}],
            "scheduler": scheduler,
        }
    )
    with nullcontext() if fits else refused("time-above-limit", UsageError, "partition train", "1m30s"):
        partition_of(spec, JobSpec(name="train", bundled="train", time=time))
