"""What a partition gives a job: its time, and the GPUs that bundled programs ask for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError, raise_together
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.script import with_gpus
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import condition, refused

PARTITIONS = (
    PartitionFacts("h100", ("c-h100-1", "c-h100-2"), gpus=8),
    PartitionFacts("cpu", ("c-cpu-1",)),
)
SITE = site_of(inventory_with(*PARTITIONS))
WITHOUT_SLURM = site_of(inventory_with(*PARTITIONS, scheduler="none"))


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
def test_training_uses_the_gpus_of_its_partition(
    given: dict[str, Any], gpus: int, ranks: int
) -> None:
    job = with_gpus(SITE, JobSpec(name="t", bundled="train", **given))
    assert (job.gpus, job.tasks_per_node) == (gpus, ranks)


def test_program_of_one_rank_has_one_gpu() -> None:
    job = with_gpus(SITE, JobSpec(name="s", bundled="sample"))
    assert (job.gpus, job.tasks_per_node) == (1, 1)
    assert with_gpus(SITE, JobSpec(name="s", bundled="sample", gpus=0)).gpus == 0
    free = with_gpus(WITHOUT_SLURM, JobSpec(name="s", bundled="predict"))
    assert (free.tasks_per_node, "gpus" in free.model_fields_set) == (1, False)


def test_probe_export_and_own_scripts_keep_their_gpus(tmp_path: Any) -> None:
    for job in (
        *(JobSpec(name="p", bundled=one) for one in ("probe", "export")),
        JobSpec(name="s", script=tmp_path / "own.sh"),
    ):
        assert with_gpus(SITE, job) == job


def test_training_without_scheduler_has_a_rank_for_each_gpu() -> None:
    job = with_gpus(WITHOUT_SLURM, JobSpec(name="t", bundled="train"))
    assert (job.tasks_per_node, "gpus" in job.model_fields_set) == (8, False)


@pytest.mark.parametrize(
    ("scheduler", "time", "fits"),
    [("slurm", "2m", True), ("slurm", "121s", False), ("none", "90s", True), ("none", "2m", False)],
)
def test_slurm_rounds_times_up_to_minutes_and_mpirun_does_not(
    scheduler: str, time: str, fits: bool
) -> None:
    partition = PartitionFacts("train", ("n1",), max_time=90)
    site = site_of(inventory_with(partition, scheduler=scheduler))
    with (
        nullcontext() if fits else refused("job-unfit/time", UsageError, "partition train", "1m30s")
    ):
        raise_together(site.faults(Request.read(JobSpec(name="train", bundled="train", time=time))))


OWN_SITE, FOREIGN_SITE = (
    site_of(
        inventory_with(
            PartitionFacts("short", ("n1",), max_time=1800),
            PartitionFacts("long", ("n1",)),
            is_foreign=is_foreign,
        )
    )
    for is_foreign in (False, True)
)


@pytest.mark.parametrize(
    ("lines", "given", "fits"),
    [
        ("--time=30", {}, True),
        ("-t 0-01", {}, False),
        ("--time=1:00:00 --partition=long", {}, True),
        ("--time=31 --partition=short", {}, False),
        ("--time=31 --partition=long,short", {}, True),
        ("--time=31", {"time": "5m"}, True),
        ("--time=31", {"partition": "long"}, True),
        ("--time=UNLIMITED", {}, True),
    ],
)
def test_script_above_the_time_limit_is_refused_as_the_flag(
    tmp_path: Path, lines: str, given: dict[str, Any], fits: bool
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {lines}\n")
    partition = {} if "--partition" in lines else {"partition": "short"}
    job = JobSpec(name="j", script=script, **{**partition, **given})
    for site in (OWN_SITE, FOREIGN_SITE):
        codes = [condition(fault) for fault in site.faults(Request.read(job))]
        assert codes == ([] if fits else ["job-unfit/time"])


def test_partition_that_attach_left_out_names_attach() -> None:
    """On a cluster of others, another account may open the partition."""
    job = JobSpec(name="t", bundled="train", partition="gpuq")
    fix = "clusterctl attach LOGIN --account NAME --partition gpuq"
    (foreign,) = FOREIGN_SITE.faults(Request.read(job))
    (own,) = OWN_SITE.faults(Request.read(job))
    assert (condition(foreign), condition(own)) == ("not-found/partition", "not-found/partition")
    assert fix in foreign.fix
    assert fix not in own.fix
