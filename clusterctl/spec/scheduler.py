"""What the hosts of a cluster need for its scheduler: Slurm, or none, so that mpirun starts jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

SchedulerName: TypeAlias = Literal["slurm", "none"]
DEFAULT: Final[SchedulerName] = "slurm"


@dataclass(frozen=True, slots=True)
class SchedulerNeeds:
    """What differs between the schedulers on the hosts.

    has_daemons: whether the scheduler has daemons, with accounts of their own, that confine jobs.
    starts_by_ssh: whether ranks are started over SSH, so that each host reaches all others.
    declares_gpus: whether jobs get only GPUs that the spec declares.
    """

    has_daemons: bool
    starts_by_ssh: bool
    declares_gpus: bool


NEEDS: Final[Mapping[SchedulerName, SchedulerNeeds]] = {
    "slurm": SchedulerNeeds(has_daemons=True, starts_by_ssh=False, declares_gpus=True),
    "none": SchedulerNeeds(has_daemons=False, starts_by_ssh=True, declares_gpus=False),
}
