"""What a job is: the words of `submit`'s flags, and JobSpec, what is asked of Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from clusterctl.spec.base import Model, Toggle
from clusterctl.spec.job_values import Argument, Environment, Image, Pattern
from clusterctl.spec.models import PATTERN_WORDS, AccountName, PartitionName
from clusterctl.spec.paths import FileName
from clusterctl.spec.units import JobMemoryMib, JobTimeS
from clusterctl.spec.words import shown

BUNDLED_JOBS = ("train", "eval", "bench", "gemm", "allreduce", "probe")
RUN_ME_AGAIN: Final = 75  # EX_TEMPFAIL of sysexits.h: the program saved its work and wants to go on with it

JOB_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
CONSTRAINT: Final = r"^[A-Za-z0-9_&|,*()\[\]-]+$"
_INDICES = r"[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9})?)?"
SIGNAL: Final = r"^(HUP|INT|TERM|USR1|USR2)@[0-9]{1,5}$"
_MAX_SIGNAL_S = 65_535
ARRAY: Final = rf"^{_INDICES}(,{_INDICES})*(%[0-9]{{1,9}})?$"

JOB_PATTERN_WORDS: Final[Mapping[str, str]] = {
    **PATTERN_WORDS,
    JOB_NAME: "at most 64 letters, digits, dots, dashes or underscores, the first a letter or digit",
    CONSTRAINT: "features of nodes, joined by & or |",
    SIGNAL: "a signal and seconds before the time limit, such as USR1@120",
    ARRAY: "indices such as 0-15, 1,3,5 or 0-15%4",
}

_MAX_COUNT = 65_533  # Slurm counts nodes, tasks and CPUs of a node in 16 bits
_ARRAY_RANGE = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?")


class Launcher(StrEnum):
    """How ranks are started: ``srun`` speaks PMIx, ``mpirun`` gets a rendered hostfile."""

    SRUN = "srun"
    MPIRUN = "mpirun"


def _runnable_array(value: str) -> str:
    indices, _, limit = value.partition("%")
    if limit and int(limit) == 0:
        raise ValueError(f"{shown(value)} lets none of the array's jobs run")
    for first, last, stride in _ARRAY_RANGE.findall(indices):
        if int(last) < int(first):
            raise ValueError(f"{first}-{last} ends before it starts")
        if stride and int(stride) == 0:
            raise ValueError(f"{first}-{last}:{stride} has a stride of 0")
    return value


def _timely_signal(value: str) -> str:
    if int(value.partition("@")[2]) > _MAX_SIGNAL_S:
        raise ValueError(f"{shown(value)} is more than {_MAX_SIGNAL_S} seconds before the time limit")
    return value


Count = Annotated[int, Field(ge=1, le=_MAX_COUNT, strict=True)]
JobName = Annotated[str, StringConstraints(pattern=JOB_NAME)]
Signal = Annotated[str, StringConstraints(pattern=SIGNAL), AfterValidator(_timely_signal)]
Array = Annotated[str, StringConstraints(pattern=ARRAY), AfterValidator(_runnable_array)]


class JobWords(Model):
    """What can be said of a job. Each field is called as its flag is; None leaves the choice to Slurm."""

    name: JobName | None = Field(None, description="the job's name; default: the program's or the script's")
    args: tuple[Argument, ...] = Field((), description="what the program gets")
    nodes: Count = Field(1, description="nodes")
    tasks_per_node: Count = Field(1, description="ranks on each node")
    cpus: Count | None = Field(None, description="cores of each rank")
    gpus: Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)] = Field(0, description="GPUs on each node")
    mem: JobMemoryMib | None = Field(None, description="memory on each node")
    time: JobTimeS | None = Field(None, description="time limit; a bare number is minutes")
    partition: PartitionName | None = Field(None, description="Slurm partition; default: the first")
    account: AccountName | None = Field(None, description="Slurm account")
    qos: AccountName | None = Field(None, description="quality of service")
    constraint: Annotated[str, StringConstraints(pattern=CONSTRAINT)] | None = Field(
        None, description="features that the nodes must have"
    )
    array: Array | None = Field(None, description="indices of a job array")
    signal: Signal | None = Field(
        None,
        description="a signal that the program gets, and how many seconds before the time limit",
        examples=["USR1@120"],
    )
    requeue: Toggle = Field(
        False, description=f"whether the job runs again, in its folder, when it ends with {RUN_ME_AGAIN}"
    )
    launcher: Launcher = Field(Launcher.SRUN, description="how ranks are started")
    folder: Toggle = Field(True, description="whether the script's folder is sent with it")
    include: tuple[Pattern, ...] = Field((), description="patterns of what is sent though .gitignore has it")
    exclude: tuple[Pattern, ...] = Field((), description="patterns of what is not sent")
    outputs: tuple[Pattern, ...] = Field(
        (),
        description="patterns of what is brought home, as in a .gitignore file; default: all but checkpoints",
        examples=["results/**"],
    )
    env: Environment = Field({}, description="variables that the program gets")
    container: Image | None = Field(
        None, description="an Apptainer image that the program runs in: a file, or a path on the cluster"
    )
    requirements: FileName | None = Field(
        None, description="a requirements file, as pip reads it: packages for the program's Python"
    )

    @property
    def given(self) -> dict[str, Any]:
        """What was said, validated: all that is not merely a default."""
        return {field: getattr(self, field) for field in self.model_fields_set}


class JobSpec(JobWords):
    """One job. Exactly one of ``bundled`` and ``script`` is set. ``mem`` is in MiB, ``time`` in seconds."""

    name: JobName
    bundled: str | None = None
    script: Path | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.bundled is None) == (self.script is None):
            raise ValueError("a job is either a bundled one or a script")
        if self.bundled is not None and self.bundled not in BUNDLED_JOBS:
            raise ValueError(f"{self.bundled!r} is not a bundled job")
        return self

    @property
    def tasks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.tasks_per_node
