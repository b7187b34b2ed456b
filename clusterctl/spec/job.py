"""JobSpec, the description of a job: its options, its program, and the files that are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from clusterctl.errors import BadValueError, UsageError, excluded
from clusterctl.spec.job_options import OPTIONS, JobOptions, job_options
from clusterctl.spec.job_values import JobName
from clusterctl.spec.program import (
    BUNDLED_JOBS,
    MODULE_FLAG,
    ONE_RANK_JOBS,
    head_of,
    named_job,
    reads_words,
    safe_name,
)
from clusterctl.spec.sbatch import directives_of, values_in


@dataclass(frozen=True, slots=True)
class Project:
    """The folder that is sent with a script, and the paths in it that start the program.

    script: path of the script below ``folder``.
    start: path of the folder in which the program starts, below ``folder``.
    roots: paths of folders below ``folder`` that contain imported packages.
    """

    folder: Path
    script: str
    start: str = "."
    roots: tuple[str, ...] = ()


class JobSpec(JobOptions):
    """A job: ``bundled`` (a program of clusterctl) or ``script`` is set. ``mem``: MiB. Times:
    seconds.

    run_module: name of the Python module to run, as `python -m` does; ``script`` is its file. None: run
        ``script``.
    project: None: the project is the script's folder.
    places: name of an option -> where its value stands, for messages. Default: its flag.
    ``model_fields_set``: names of the fields that the caller set.
    """

    name: JobName
    bundled: str | None = None
    script: Path | None = None
    run_module: str | None = None
    project: Project | None = None
    places: Mapping[str, str] = Field({})

    @model_validator(mode="after")
    def _has_one_program(self) -> Self:
        if (self.bundled is None) == (self.script is None):
            raise BadValueError("job-or-script", "give either a bundled job or a script, not both")
        if self.bundled is not None and self.bundled not in BUNDLED_JOBS:
            raise BadValueError("unknown-job-type", f"{self.bundled!r} is not a bundled job")
        return self

    @property
    def record(self) -> dict[str, Any]:
        """The fields, as environment.client.json has them: ``mem`` and ``time`` as text: ``4GiB``,
        ``1h``; the names of secrets.
        """
        # The options have a serializer since their validation; that of the whole would take as long
        # to build as all checks.
        options = {name: getattr(self, name) for name in JobOptions.model_fields}
        project = asdict(self.project) if self.project is not None else None
        if project is not None:
            del project["folder"]
        return {
            **JobOptions.model_construct(**options).model_dump(exclude={"secret"}),
            "bundled": self.bundled,
            "script": self.script,
            "run_module": self.run_module,
            "project": project,
            "secret": (*self.secret,),
        }

    @property
    def place(self) -> Project:
        """The script's place in the files that are sent. Only a job with a script has it."""
        if self.project is not None:
            return self.project
        path = self.script or Path()
        return Project(path.parent, path.name)

    @property
    def tasks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.nodes * self.tasks_per_node


def job_spec(target: str, flags: Mapping[str, object]) -> JobSpec:
    """Return the job that a command line of `submit` requests.

    target: the name of a bundled job, or the path of a script relative to the current folder.
    flags: field of JobOptions -> value that the user gave.

    Raises:
        UsageError: there is no such job or script, or flags are wrong; ``failures`` has an entry
            for each flag.
    """
    return job_of(target, job_options(flags).given, folder=Path())


def job_of(target: str, options: Mapping[str, Any], *, folder: Path) -> JobSpec:
    """Return a job. ``options``: already valid.

    target: a bundled job, a path relative to ``folder``, or ``-m MODULE``.

    Raises:
        UsageError: there is no such job or script, or options exclude each other.
    """
    reject_quantities_twice(options)
    bundled, script = named_job(target, folder)
    module = target.removeprefix(MODULE_FLAG).strip() if target.startswith(MODULE_FLAG) else None
    name = safe_name(module.rpartition(".")[2] if module else Path(target).stem)
    if script is not None and (
        own_name := values_in(head_of(script), "--job-name").get("--job-name")
    ):
        name = safe_name(own_name)
    # These values are valid, and a validator of the whole model takes long to build.
    job = JobSpec.model_construct(name=bundled or name, bundled=bundled, script=script)
    job = job.model_copy(update={"run_module": module}) if module else job
    chosen = {
        field: value for field, value in options.items() if field != "name" or value is not None
    }
    job = job.model_copy(update=chosen)
    if job.sweep is not None:
        if job.array is not None:
            raise UsageError(
                "a job can't have both a sweep and an array, because a sweep is a job array",
                about="sweep-with-array",
                fix="remove --array or --sweep",
            )
        is_read_by_words = script is not None and reads_words(script)
        sweep = job.sweep.for_arguments(job.args, reads_words=is_read_by_words)
        job = job.model_copy(update={"array": sweep.array, "sweep": sweep})
    if both := sorted(job.secret.keys() & job.env.keys()):
        raise excluded(f"--secret {both[0]}", f"--env {both[0]}")
    if bundled in ONE_RANK_JOBS and job.tasks > 1:
        raise UsageError(
            f"the bundled job {bundled} runs on a single rank, but {job.tasks} ranks were "
            "requested",
            about="one-rank",
            fix="remove --nodes and --tasks-per-node",
        )
    return job


def reject_quantities_twice(options: Mapping[str, Any]) -> None:
    """Raise UsageError if a flag and an option of --slurm set the same quantity."""
    for request in directives_of(options.get("slurm", ())):
        for name in options:
            is_same = name in OPTIONS and OPTIONS[name].sbatch in request.quantities
            if is_same and request.option and not request.option.beside:
                raise excluded(OPTIONS[name].flag, f"--slurm {request.own_name}")
