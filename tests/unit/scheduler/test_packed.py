"""The scripts of jobs that run the tasks of an array or a sweep inside a single job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.script import fitted_to
from clusterctl.spec.job import JobSpec, job_of
from clusterctl.spec.job_options import job_options
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import condition

SITE = site_of(inventory_with(PartitionFacts("train", ("d-train-1", "d-train-2")), max_array=11))


def job(folder: Path, lines: str = "", **options: Any) -> JobSpec:
    (folder / "t.sh").write_text(f"#!/bin/bash\n{lines}\ntrue\n")
    return job_of("t.sh", job_options(options).given, folder=folder)


def script_of(job: JobSpec) -> list[str]:
    fitted = fitted_to(SITE, Request.read(job))
    assert [*SITE.faults(fitted)] == []
    return SITE.render(fitted).splitlines()


def options_in(script: list[str]) -> list[str]:
    lines = [line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH")]
    return [word for line in lines for word in line.split()]


def pack_options_in(script: list[str]) -> list[str]:
    (line,) = (line for line in script if "/pack.py run" in line)
    return line.removesuffix(" \\").split()[4:]


@pytest.mark.parametrize(
    ("lines", "options", "asked", "packed"),
    [
        # Whole nodes, with their memory. MaxArraySize is 11 here.
        ("", {"array": "0-99"}, ["--exclusive", "--mem=0"], ["--tasks=0-99", "--fit"]),
        (
            "",
            {"array": "0-9", "mem": "2G"},
            ["--mem=2048M", "--exclusive"],
            ["--tasks=0-9", "--fit"],
        ),
        (
            "",
            {"array": "1,3-5%2", "tasks_per_node": 4},
            ["--ntasks-per-node=4"],
            ["--tasks=1,3-5", "--most=2"],
        ),
        (
            "",
            {"sweep": ["a=0..14"]},
            ["--exclusive", "--mem=0"],
            ["--tasks=0-14", "--fit", "--sweep"],
        ),
        ("#SBATCH --array=2-4 --ntasks=6", {}, ["--ntasks=6"], ["--tasks=2-4"]),
        (
            "#SBATCH -a 2-4\n#SBATCH --mem-per-cpu=1G",
            {},
            ["--mem-per-cpu=1G", "--exclusive"],
            ["--tasks=2-4", "--fit"],
        ),
    ],
)
def test_packed_tasks_are_a_single_job_without_an_array(
    tmp_path: Path, lines: str, options: dict[str, Any], asked: list[str], packed: list[str]
) -> None:
    script = script_of(job(tmp_path, lines, pack=True, **options))
    words = options_in(script)
    assert [word for word in words if word.startswith(("--array", "-a"))] == []
    common = ("--job-name", "--output", "--error", "--nodes", "--ntasks-per-node=1")
    assert [word for word in words if not word.startswith(common)] == asked
    assert "--output=stdout.log" in words
    found = [word for word in pack_options_in(script) if not word.startswith("--files=")]
    assert found == packed


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "option-invalid/pack"),
        ({"array": "0-20000"}, "job-unfit/packed-tasks"),
        ({"array": "1,2,0-400000000:3%4"}, "job-unfit/packed-tasks"),
        ({"array": "0-3", "ranks": 2}, "options-exclusive"),
        ({"array": "0-3", "launcher": "mpirun"}, "options-exclusive"),
    ],
)
def test_pack_without_tasks_or_with_ranks_is_refused(
    tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    fitted = fitted_to(SITE, Request.read(job(tmp_path, pack=True, **options)))
    assert [condition(fault) for fault in SITE.faults(fitted)] == [code]
