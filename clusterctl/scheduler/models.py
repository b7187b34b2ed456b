"""Jobs and nodes as frozen values. States keep Slurm's spelling, whoever runs the jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from clusterctl.errors import SchedulerError

_UNUSABLE = frozenset(
    "DOWN DRAIN DRAINED DRAINING FAIL ERROR UNKNOWN NOT_RESPONDING MAINT POWERED_DOWN FUTURE".split()
)
# How Slurm says that a job waits for nodes which nobody may use; some versions write its spaces as _.
_NODES_OUT = re.compile(r"ReqNodeNotAvail|UnavailableNodes|Nodes.required.for.job.are.DOWN")
_HELD = re.compile(r"launch.failed.requeued.held")
_MARKS = "*~#!%$@^-"  # sinfo(1), NODE STATE CODES


class Outcome(Enum):
    """What a job's state means for whoever waits for it."""

    GOES_ON = "goes on"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobState(StrEnum):
    """Slurm's base states (squeue(1), JOB STATE CODES), and two of ours.

    UNKNOWN: Slurm's word is none of them. PURGED: Slurm has no record of the job any more.
    """

    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    CONFIGURING = "CONFIGURING"
    COMPLETING = "COMPLETING"
    DEADLINE = "DEADLINE"
    FAILED = "FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PENDING = "PENDING"
    PREEMPTED = "PREEMPTED"
    RUNNING = "RUNNING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    REQUEUED = "REQUEUED"
    RESIZING = "RESIZING"
    REVOKED = "REVOKED"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    TIMEOUT = "TIMEOUT"
    UNKNOWN = "UNKNOWN"
    PURGED = "PURGED"

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES.get(self, Outcome.GOES_ON)


_FAILED = "FAILED NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PURGED".split()
_CANCELLED = "CANCELLED TIMEOUT PREEMPTED REVOKED".split()
_OUTCOMES = {
    JobState.COMPLETED: Outcome.COMPLETED,
    **{JobState(word): Outcome.FAILED for word in _FAILED},
    **{JobState(word): Outcome.CANCELLED for word in _CANCELLED},
}


_SHOWN = tuple(
    "job_id name user partition account qos state reason exit_code signal nodes "
    "submit_time start_time end_time work_dir".split()
)


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job, or one task of a job array.

    Times are Unix seconds and None where there is none yet; ``signal`` is 0 when none ended the job;
    ``exit_code`` and ``signal`` are None while the job goes on. ``prefix`` is what its id begins with.
    ``job_id`` is 0 where the record of a job can't be understood so far as to tell even its number.
    """

    job_id: int
    task: int | None = None
    name: str
    user: str
    partition: str = ""
    account: str = ""
    qos: str = ""
    state: JobState
    reason: str
    exit_code: int | None = None
    signal: int | None = None
    nodes: tuple[str, ...] = ()
    submit_time: int | None = None
    start_time: int | None = None
    end_time: int | None = None
    work_dir: str = ""
    comment: str = ""
    restarts: int | None = None
    prefix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """A job as `-o json` shows it; times are Unix seconds."""
        shown = {name: getattr(self, name) for name in _SHOWN}
        return {**shown, "job_id": self.id, "state": self.state.value, "nodes": list(self.nodes)}

    @property
    def id(self) -> str:
        """As it is named: ``12``, ``12_3`` for a task of an array, ``m12`` where no scheduler counts."""
        return self.whole_id if self.task is None else f"{self.whole_id}_{self.task}"

    @property
    def whole_id(self) -> str:
        """The id of the job, or of the array that it is a task of."""
        return f"{self.prefix}{self.job_id}"

    @property
    def outcome(self) -> Outcome:
        return self.state.outcome

    @property
    def lacks_nodes(self) -> bool:
        """Whether it waits because nodes are out of service, not because they are busy."""
        return self.state is JobState.PENDING and _NODES_OUT.search(self.reason) is not None

    @property
    def failed_to_launch(self) -> bool:
        """Whether Slurm holds it since a node could not start it."""
        return self.state is JobState.PENDING and _HELD.search(self.reason) is not None

    @property
    def ended(self) -> bool:
        return self.outcome is not Outcome.GOES_ON


@dataclass(frozen=True)
class NodeInfo:
    """One node. ``state`` is Slurm's base state, such as IDLE; ``flags`` is what holds besides: DRAIN.

    ``reason_by`` is the account that gave the reason; Slurm's daemons give theirs as slurm or root.
    """

    name: str
    shown: str
    reason: str
    cpus: int
    memory_mib: int
    gres: str
    partitions: tuple[str, ...]
    reason_by: str = ""
    allocated_mib: int = 0  # of its memory, what jobs have

    @property
    def state(self) -> str:
        """The base state, such as ``IDLE``; ``shown`` is the whole as sinfo spells it: ``idle+drain*``."""
        return self.shown.partition("+")[0].rstrip(_MARKS).upper()

    @property
    def flags(self) -> tuple[str, ...]:
        """Slurm's flags, such as ``DRAIN``; its trailing ``*`` is NOT_RESPONDING."""
        named = tuple(word.rstrip(_MARKS).upper() for word in self.shown.split("+")[1:])
        return (*named, "NOT_RESPONDING") if "*" in self.shown and "NOT_RESPONDING" not in named else named

    @property
    def usable(self) -> bool:
        """Whether Slurm would start a job on it, now or when it is free."""
        return not _UNUSABLE & {self.state, *self.flags}


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to start: its ``folder`` on the cluster and its script there.

    ``submitted_at``: Unix seconds, by our clock. ``nodes``, in order, and ``limit_s`` (0: none),
    are for clusters without a scheduler; elsewhere the script says them.
    """

    token: str
    name: str
    folder: str
    script: str
    partition: str = ""
    nodes: tuple[str, ...] = ()
    limit_s: int = 0
    submitted_at: float = 0.0

    @property
    def comment(self) -> str:
        """What marks the job, so that it is found again when the answer to its submission is lost."""
        return f"clusterctl:{self.token}"


def unmanaged_job(job: JobInfo) -> SchedulerError:
    """The error for a job whose files have no agreed place."""
    return SchedulerError(
        f"job {job.id} was not submitted by clusterctl",
        why="so its files have no agreed place",
        fix=f"look in its folder, {job.work_dir}, with `clusterctl ssh`",
    )


def worst(jobs: Sequence[JobInfo]) -> JobInfo:
    """The job that stands for all: one that failed, else one that was cancelled, else one that goes on."""
    order = (Outcome.FAILED, Outcome.CANCELLED, Outcome.GOES_ON, Outcome.COMPLETED)
    return min(jobs, key=lambda job: order.index(job.outcome))
