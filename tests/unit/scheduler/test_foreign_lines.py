"""Lines of scripts for other schedulers are named, with the flags that replace them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.scheduler.request.foreign_lines import foreign_lines
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.checks import unfit_foreign_lines
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import job_options
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import condition

SCRIPTS = [
    # The first is a script of a user.
    (
        "#PBS -N heat\n#PBS -l nodes=2:ppn=1\n#PBS -l walltime=00:10:00",
        "--name heat --nodes 2 --tasks-per-node 1 --time 00:10:00",
    ),
    (
        "#PBS -l select=4:ncpus=8:mpiprocs=4:mem=16gb,walltime=3600\n#PBS -q long -A p1 -j oe\n#PBS -J 1-9",
        "--nodes 4 --tasks-per-node 4 --mem 16gb --time 3600s --partition long --account p1 --array 1-9",
    ),
    (
        '#BSUB -J "heat[1-4]"\n#BSUB -n 8\n#BSUB -W 1:30\n#BSUB -q normal\n#BSUB -M 4GB',
        "--name heat --tasks-per-node 8 --mem 4GB --time 1:30:00 --partition normal --array 1-4",
    ),
    ("#BSUB -W 90", "--time 90m"),
    (
        "#$ -N heat\n#$ -pe mpi 16\n#$ -l h_rt=3600,h_vmem=2G\n#$ -q all.q\n#$ -cwd -V",
        "--name heat --tasks-per-node 16 --mem 2G --time 3600s --partition all.q",
    ),
    (
        "#COBALT -n 8 -t 30 -q debug\n#COBALT -A proj --jobname heat",
        "--name heat --nodes 8 --time 30m --partition debug --account proj",
    ),
]


@pytest.mark.parametrize(("text", "flags"), SCRIPTS)
def test_note_has_the_flags_in_place_of_the_lines(text: str, flags: str) -> None:
    lines = ["#!/bin/bash", *text.split("\n"), "hostname", *text.split("\n")]
    (found,) = foreign_lines("old.sh", lines)
    assert found.note.code == "foreign-directives"
    assert found.note.endswith(f"use {flags}")
    numbers = ", ".join(str(number) for number in range(2, 3 + text.count("\n")))
    assert f" {numbers}: {text.split(maxsplit=1)[0]} " in found.note
    assert job_options(found.options).given.keys() == found.options.keys() == found.places.keys()


def test_each_scheduler_has_its_note_and_other_comments_have_none() -> None:
    lines = "#!/bin/bash\n# PBS -N a\n#$HOME\n#PBSX -N\n#PBS -V\n\n#BSUB -n 2\n#SBATCH -n2\n"
    notes = [found.note for found in foreign_lines("old.sh", lines.split("\n"))]
    assert [note.partition(":")[0] for note in notes] == ["old.sh, line 5", "old.sh, line 7"]


def test_lines_that_would_not_fit_the_cluster_are_named(tmp_path: Path) -> None:
    script = tmp_path / "old.sh"
    script.write_text(
        "#!/bin/bash\n#PBS -q gone -N a\n#PBS -l nodes=9:ppn=1\n#PBS -l walltime=99:00:00\n"
    )
    site = site_of(inventory_with(PartitionFacts("train", ("c-1",), max_time=3600)))
    request = Request.read(JobSpec(name="a", script=script))
    assert [*site.faults(request)] == []
    assert [(condition(fault), fault.where) for fault in unfit_foreign_lines(site, request)] == [
        ("not-found/partition", "`#PBS -q gone -N a` in line 2 of old.sh"),
        ("job-unfit/nodes", "`#PBS -l nodes=9:ppn=1` in line 3 of old.sh"),
        ("job-unfit/time", "`#PBS -l walltime=99:00:00` in line 4 of old.sh"),
    ]
