"""Lines of scripts for other schedulers are named, with the flags that replace them."""

from __future__ import annotations

import shlex

import pytest

from clusterctl.scheduler.foreign_lines import notes_of_foreign_lines
from clusterctl.spec.job_options import job_options

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
    (note,) = notes_of_foreign_lines("old.sh", lines)
    assert note.code == "foreign-directives"
    assert note.endswith(f"use {flags}")
    numbers = ", ".join(str(number) for number in range(2, 3 + text.count("\n")))
    assert f" {numbers}: {text.split(maxsplit=1)[0]} " in note
    words = shlex.split(flags)
    given = {
        name.removeprefix("--").replace("-", "_"): int(value) if value.isdecimal() else value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert job_options(given).given.keys() == given.keys()


def test_each_scheduler_has_its_note_and_other_comments_have_none() -> None:
    lines = "#!/bin/bash\n# PBS -N a\n#$HOME\n#PBSX -N\n#PBS -V\n\n#BSUB -n 2\n#SBATCH -n2\n"
    notes = list(notes_of_foreign_lines("old.sh", lines.split("\n")))
    assert [note.partition(":")[0] for note in notes] == ["old.sh, line 5", "old.sh, line 7"]
