"""JobSpec: what `submit` asks of Slurm."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from clusterctl.spec.models import AccountName, Model, PartitionName

BUNDLED_JOBS = ("train", "probe")


class Launcher(StrEnum):
    """How ranks are started: ``srun`` speaks PMIx, ``mpirun`` gets a rendered hostfile."""

    SRUN = "srun"
    MPIRUN = "mpirun"


class JobSpec(Model):
    """One job. Exactly one of ``bundled`` and ``script`` is set; None leaves a choice to Slurm."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    bundled: str | None = None
    script: Path | None = None
    args: tuple[str, ...] = ()
    nodes: Annotated[int, Field(ge=1)] = 1
    tasks_per_node: Annotated[int, Field(ge=1)] = 1
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    memory_mib: Annotated[int, Field(ge=1)] | None = None
    time_s: Annotated[int, Field(ge=1)] | None = None
    partition: PartitionName | None = None
    account: AccountName | None = None
    qos: AccountName | None = None
    constraint: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_&|,*()\[\]-]+$")] | None = None
    array: Annotated[str, StringConstraints(pattern=r"^[0-9,:%-]+$")] | None = None
    launcher: Launcher = Launcher.SRUN

    @property
    def tasks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.tasks_per_node
