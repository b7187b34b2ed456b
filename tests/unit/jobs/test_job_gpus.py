"""What a partition gives a job: its time, and the GPUs that bundled programs ask for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.script import partition_of, with_gpus
from clusterctl.spec.job import JobSpec
from clusterctl.state.facts import PartitionFacts
from tests.support.inventories import facts_with
from tests.support.messages import refused

PARTITIONS = (PartitionFacts("h100", ("c-h100-1", "c-h100-2"), gpus=8), PartitionFacts("cpu", ("c-cpu-1",)))
FACTS = facts_with(*PARTITIONS)
WITHOUT_SLURM = facts_with(*PARTITIONS, has_slurm=False)


@pytest.mark.parametrize(
    ("given", "gpus", "ranks"),
    [
        ({}, 8, 8),
        ({"gpus": 2}, 2, 2),
        ({"tasks_per_node": 4}, 4, 4),
        ({"tasks_per_node": 16}, 8, 16),
        ({"gpus": 4, "tasks_per_node": 2}, 4, 2),
        ({"gpus": 0}, 0, 1),
        ({"args": ("--epochs", "3", "--device", "cpu")}, 0, 1),
        ({"args": ("--device=cpu",)}, 0, 1),
        ({"args": ("--device", "gpu")}, 8, 8),
        ({"partition": "cpu"}, 0, 1),
        ({"partition": "typo"}, 0, 1),
    ],
)
def test_a_training_uses_the_gpus_of_its_partition(given: dict[str, Any], gpus: int, ranks: int) -> None:
    job = with_gpus(FACTS, JobSpec(name="t", bundled="train", **given))
    assert (job.gpus, job.tasks_per_node) == (gpus, ranks)


def test_what_runs_on_one_rank_has_one_gpu() -> None:
    job = with_gpus(FACTS, JobSpec(name="s", bundled="sample"))
    assert (job.gpus, job.tasks_per_node) == (1, 1)
    assert with_gpus(FACTS, JobSpec(name="s", bundled="sample", gpus=0)).gpus == 0
    free = with_gpus(WITHOUT_SLURM, JobSpec(name="s", bundled="predict"))
    assert (free.tasks_per_node, "gpus" in free.model_fields_set) == (1, False)


def test_the_proof_and_own_scripts_ask_for_what_they_say(tmp_path: Any) -> None:
    for job in (
        *(JobSpec(name="p", bundled=one) for one in ("probe", "export")),
        JobSpec(name="s", script=tmp_path / "own.sh"),
    ):
        assert with_gpus(FACTS, job) == job


def test_without_a_scheduler_there_is_a_rank_for_each_gpu() -> None:
    job = with_gpus(WITHOUT_SLURM, JobSpec(name="t", bundled="train"))
    assert (job.tasks_per_node, "gpus" in job.model_fields_set) == (8, False)


@pytest.mark.parametrize(
    ("scheduler", "time", "fits"),
    [("slurm", "2m", True), ("slurm", "121s", False), ("none", "90s", True), ("none", "2m", False)],
)
def test_slurm_rounds_times_up_to_minutes_and_mpirun_does_not(scheduler: str, time: str, fits: bool) -> None:
    facts = facts_with(PartitionFacts("train", ("n1",), max_time=90), has_slurm=scheduler == "slurm")
    with nullcontext() if fits else refused("time-above-limit", UsageError, "partition train", "1m30s"):
        partition_of(facts, JobSpec(name="train", bundled="train", time=time))
