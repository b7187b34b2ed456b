"""Values of `sbatch --array`, and the limits of Slurm that an array meets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError, raise_together
from clusterctl.scheduler.request.arrays import count_at_most, tasks_of
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import refused

TRAIN = PartitionFacts("train", ("d-train-1",))


def check(job: JobSpec, **facts: Any) -> None:
    """Make the checks before a submission, by default where Slurm's MaxArraySize is 31."""
    site = site_of(inventory_with(TRAIN, **{"max_array": 31, **facts}))
    raise_together(site.faults(Request.read(job)))


def array_of(folder: Path, array: str, **more: Any) -> JobSpec:
    (folder / "job.sh").write_text(f"#!/bin/bash\n#SBATCH --array={array}\n")
    return JobSpec(name="mine", script=folder / "job.sh", **more)


@pytest.mark.parametrize("array", ["[1-9:2]%2", "1-9:2%2", "[1,3,5-9:2]%2"])
def test_array_may_have_brackets_in_a_flag_and_in_a_script(tmp_path: Path, array: str) -> None:
    for job in (array_of(tmp_path, array), JobSpec(name="a", bundled="bench", array=array)):
        found = Request.read(job).array
        assert (tasks_of(found), found.partition("%")[2]) == ([1, 3, 5, 7, 9], "2")


def test_tasks_are_counted_without_a_list_of_them() -> None:
    assert count_at_most("0-99999999:2,7%3") == 50_000_001


@pytest.mark.parametrize("array", ["5-1", "0-9:0", "1-3,", "20-"])
def test_malformed_array_of_a_script_is_left_to_slurm(tmp_path: Path, array: str) -> None:
    check(array_of(tmp_path, array))


@pytest.mark.parametrize("is_foreign", [False, True])
def test_array_above_slurms_limit_is_refused(tmp_path: Path, is_foreign: bool) -> None:
    check(array_of(tmp_path, "0-30:2%50"), is_foreign=is_foreign)
    for array in ("0-31", "1,31%2", "0-99999999"):
        with refused("job-unfit/array-index", UsageError, "--pack"):
            check(array_of(tmp_path, array), is_foreign=is_foreign)
    # Slurm takes no array at all.
    check(JobSpec(name="a", bundled="bench"), max_array=0)
    with refused("job-unfit/array-index", UsageError, "--pack"):
        check(array_of(tmp_path, "0"), max_array=0)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "job-unfit/tasks"),
        ({"account": "mine"}, "job-unfit/tasks"),
        ({"account": "other"}, None),
        ({"qos": "long"}, None),
        ({"slurm": ("--qos=long",)}, None),
    ],
)
def test_array_above_the_default_limit_of_jobs_is_refused(
    tmp_path: Path, options: dict[str, Any], code: str | None
) -> None:
    """The limit is that of the account and the QOS that jobs get if they name none."""
    job = array_of(tmp_path, "0-24", **options)
    facts = {"is_foreign": True, "max_submit": 20, "account": "mine"}
    if code is None:
        check(job, **facts)
        return
    with refused(code, UsageError, "--pack"):
        check(job, **facts)
