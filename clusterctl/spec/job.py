"""JobSpec: what `submit` asks of Slurm."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from clusterctl.spec.models import AccountName, Model, PartitionName
from clusterctl.spec.words import shown

BUNDLED_JOBS = ("train", "probe")

JOB_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
CONSTRAINT: Final = r"^[A-Za-z0-9_&|,*()\[\]-]+$"
_INDICES = r"[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9})?)?"
ARRAY: Final = rf"^{_INDICES}(,{_INDICES})*(%[0-9]{{1,9}})?$"

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


def _can_travel(value: str) -> str:
    """An argument that can be written into a script and passed to a process."""
    if "\0" in value:
        raise ValueError(f"{shown(value)} has a null byte, which no argument can have")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"{shown(value)} is not UTF-8 text") from exc
    return value


Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
Argument = Annotated[str, AfterValidator(_can_travel)]


class JobSpec(Model):
    """One job. Exactly one of ``bundled`` and ``script`` is set; None leaves a choice to Slurm."""

    name: Annotated[str, StringConstraints(pattern=JOB_NAME)]
    bundled: str | None = None
    script: Path | None = None
    args: tuple[Argument, ...] = ()
    nodes: Count = 1
    tasks_per_node: Count = 1
    cpus_per_task: Count | None = None
    gpus_per_node: Annotated[int, Field(ge=0, le=_MAX_COUNT)] = 0
    memory_mib: Annotated[int, Field(ge=1)] | None = None
    time_s: Annotated[int, Field(ge=1)] | None = None
    partition: PartitionName | None = None
    account: AccountName | None = None
    qos: AccountName | None = None
    constraint: Annotated[str, StringConstraints(pattern=CONSTRAINT)] | None = None
    array: Annotated[str, StringConstraints(pattern=ARRAY), AfterValidator(_runnable_array)] | None = None
    launcher: Launcher = Launcher.SRUN

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
