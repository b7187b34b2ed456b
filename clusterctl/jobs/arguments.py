"""The arguments of bundled jobs, as the payload's own parser on this machine sees them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.spec.job import MODEL_JOBS, JobSpec, sweep_arguments
from clusterctl.util.assets import asset
from clusterctl.util.process import Result, run

_HELP: Final = frozenset({"-h", "--help"})
_LAUNCHERS: Final = ("SLURM_", "OMPI_", "PMI_", "PMIX_")  # variables of a job that we may be called from


def reject_wrong_arguments(jobs: Sequence[JobSpec], before: Sequence[str] = ()) -> None:
    """Refuse bundled jobs whose arguments the program would refuse; ``before`` is what it gets before them.

    What only the run tells is not known here: files of the cluster, among them one after --config, and what
    depends on the number of ranks or on a GPU.

    Raises:
        UsageError: one is unknown, has a wrong value, or contradicts another.
    """
    checked = [
        job for job in jobs if job.bundled and (before or job.args or job.sweep or job.bundled in MODEL_JOBS)
    ]
    if not checked:
        return
    tasks = [(job, words) for job in checked for words in _of_tasks(job)]
    lines = [[str(job.bundled), *before, *words] for job, words in tasks]
    answers = json.loads(_payload(["payload.cli.arguments"], json.dumps(lines)).stdout)
    wrong = [(job, said) for (job, _), said in zip(tasks, answers, strict=True) if said]
    for job, said in wrong[:1]:
        raise UsageError(
            f"{job.bundled}: {said}",
            code="program-arguments",
            where=job.name if len(jobs) > 1 else "",
            fix=f"`clusterctl submit {job.bundled} -- --help` lists its arguments",
        )


def _of_tasks(job: JobSpec) -> list[list[str]]:
    """The program's arguments, of a sweep those of each task."""
    tasks = job.sweep.tasks if job.sweep is not None else [{}]
    return [[*job.args, *sweep_arguments(values)] for values in tasks]


def help_wanted(jobs: Sequence[JobSpec]) -> str | None:
    """The bundled job among these whose arguments ask for the program's help."""
    return next((job.bundled for job in jobs if job.bundled and not _HELP.isdisjoint(job.args)), None)


def help_of(bundled: str) -> str:
    """The help of a bundled job's program, with the command that it is submitted by."""
    columns = str(shutil.get_terminal_size().columns)
    done = _payload(["payload", bundled, "--help"], COLUMNS=columns)
    text = done.stdout.replace(f"python -m payload {bundled}", f"clusterctl submit {bundled} --", 1)
    if bundled in MODEL_JOBS:
        text += f"\n`clusterctl submit {bundled} --run RUN` gives --model-folder and --weights.\n"
    return text


def surroundings() -> dict[str, str]:
    """The environment of a program that runs alone on this machine, on all cores, whoever called us."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(_LAUNCHERS)}
    cores = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return {"OMP_NUM_THREADS": cores, **env, "PYTHONPATH": str(asset("payload").parent)}


def _payload(program: Sequence[str], stdin: str = "", **variables: str) -> Result:
    """Run a part of the payload that needs the standard library only: without site, that is quick."""
    env = {**surroundings(), **variables}
    done = run([sys.executable, "-P", "-S", "-m", *program], stdin=stdin, env=env)
    if done.rc:
        why = (done.stderr.strip().splitlines() or [f"it ended with {done.rc}"])[-1]
        raise ClusterctlError(
            "the bundled program can't be asked for its arguments", code="program-not-asked", why=why
        )
    return done
