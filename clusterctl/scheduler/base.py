"""The protocols of a scheduler: Slurm, or mpirun over SSH where a cluster has none; and its jobs and nodes.

The values are frozen. States keep Slurm's spelling, whoever runs the jobs.
"""

# ruff: noqa: ARG002 - what only Slurm does is here in full

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, Protocol, TypeVar, runtime_checkable

from clusterctl.errors import AnswerLostError, ClusterctlError, SchedulerError, TransportError, UsageError
from clusterctl.transport.base import Transport
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock

_UNUSABLE = frozenset(
    "DOWN DRAIN DRAINED DRAINING FAIL ERROR UNKNOWN NOT_RESPONDING MAINT POWERED_DOWN FUTURE".split()
)
# How Slurm says that a job waits for nodes which nobody may use; some versions write its spaces as _.
_NODES_OUT = re.compile(r"ReqNodeNotAvail|UnavailableNodes|Nodes.required.for.job.are.DOWN")
_HELD = re.compile(r"launch.failed.requeued.held")
_MARKS = "*~#!%$@^-"  # sinfo(1), NODE STATE CODES

_T = TypeVar("_T")

_MARK = "clusterctl:"  # what the comment of a job of ours begins with, before its token


def comment_of(token: str) -> str:
    """What marks the job, so that it is found again when the answer to its submission is lost."""
    return _MARK + token


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
    "name user partition account qos state reason exit_code signal nodes "
    "submit_time start_time end_time elapsed_s time_limit_s exit tres work_dir".split()
)


def shown_exit(exit_code: int | None, number: int | None) -> str:
    """The signal that ended a job by its name, else its exit code; "" if it is not known."""
    if not number:
        return "" if exit_code is None else str(exit_code)
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, or none of this system
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job, or one task of a job array.

    Times are Unix seconds and None where there is none yet; ``signal`` is 0 when none ended the job;
    ``exit_code`` and ``signal`` are None while the job goes on. ``time_limit_s`` is None without a limit.
    ``tres`` is what it has, or asks for, as Slurm writes it: ``cpu=2,mem=200M,node=1``.
    ``prefix`` is what its id begins with.
    ``number`` is 0 where the record of a job can't be understood so far as to tell even its number.
    """

    number: int
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
    time_limit_s: int | None = None
    tres: str = ""
    expected_start: int | None = None  # of a job that waits, where Slurm has an estimate
    work_dir: str = ""
    comment: str = ""
    restarts: int | None = None
    prefix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """A job as `-o json` shows it: times as Unix seconds, and as ISO 8601 in UTC."""
        shown = {name: getattr(self, name) for name in _SHOWN}
        times = {"submitted": self.submit_time, "started": self.start_time, "ended": self.end_time}
        return {
            "job_id": self.id,
            **shown,
            **{name: _in_utc(at) for name, at in times.items()},
            "state": self.state.value,
            "nodes": list(self.nodes),
        }

    @property
    def id(self) -> str:
        """As it is named: ``12``, ``12_3`` for a task of an array, ``m12`` where no scheduler counts."""
        return self.whole_id if self.task is None else f"{self.whole_id}_{self.task}"

    @property
    def elapsed_s(self) -> int | None:
        """Seconds from its start to its end, or to now by this machine's clock; None before its start."""
        if self.start_time is None:
            return None
        end = self.end_time if self.end_time is not None else int(time.time())
        return max(0, end - self.start_time)

    @property
    def exit(self) -> str:
        """The signal that ended it by its name, else its exit code; "" while it goes on, or if not known."""
        return shown_exit(self.exit_code, self.signal)

    @property
    def whole_id(self) -> str:
        """The id of the job, or of the array that it is a task of."""
        return f"{self.prefix}{self.number}"

    @property
    def token(self) -> str:
        """That of its submission; "" where it was not submitted by clusterctl."""
        return self.comment.removeprefix(_MARK) if self.comment.startswith(_MARK) else ""

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


@lru_cache  # many jobs have the same
def _in_utc(at: int | None) -> str | None:
    """A time in ISO 8601; None for one that no calendar has, which a damaged record may hold."""
    with suppress(OverflowError, ValueError, OSError):
        return None if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return None


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
class StepInfo:
    """A step of a job, or the whole job as its first: the most memory that a task had, in bytes, and where.

    ``cancelled_by`` is the uid of the user who cancelled it.
    """

    id: str
    cancelled_by: str = ""
    peak: int = 0
    peak_host: str = ""


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


def unmanaged_job(job: JobInfo) -> SchedulerError:
    return SchedulerError(
        f"job {job.id} was not submitted by clusterctl",
        code="not-our-job",
        why="so its files have no agreed place",
        fix=f"look in its folder, {job.work_dir}, with `clusterctl ssh`",
    )


def worst(jobs: Sequence[JobInfo]) -> JobInfo:
    """The job that stands for all: one that failed, else one that was cancelled, else one that goes on."""
    order = (Outcome.FAILED, Outcome.CANCELLED, Outcome.GOES_ON, Outcome.COMPLETED)
    return min(jobs, key=lambda job: order.index(job.outcome))


def state_counts(tasks: Sequence[JobInfo]) -> str:
    """How many tasks of an array are in which state: ``3 COMPLETED, 1 RUNNING``."""
    return ", ".join(f"{count} {state}" for state, count in Counter(job.state.value for job in tasks).items())


def patiently(clock: Clock, patience_s: float, ask: Callable[[], _T]) -> _T:
    """What ``ask`` returns; it is called again, within bounds, while its error says that this may help."""
    for _ in clock.polls(patience_s, first_s=0.5, longest_s=5.0):
        try:
            return ask()
        except ClusterctlError as exc:
            if not exc.retryable:
                raise
            last = exc
    raise last


def lost_job(scheduler: Jobs, request: JobRequest, cause: ClusterctlError) -> str:
    """The id of a job whose submission got no answer, if the scheduler has it.

    Raises:
        AnswerLostError: it does not, or can't be asked.
    """
    with suppress(SchedulerError, TransportError):
        if (job := scheduler.by_token(request.token, request.submitted_at)) is not None:
            return job.whole_id
    raise AnswerLostError(
        "the scheduler did not say whether it took the job",
        where=scheduler.transport.host,
        why=cause.why or cause.what,
        fix="look at `clusterctl jobs` before submitting again: the job is listed if it was taken",
        host=scheduler.transport.host,
    ) from cause


class Jobs(Protocol):
    """What a user of a cluster may do: run jobs there, and look. ``transport`` reaches the controller.

    All of it raises SchedulerError where the answer is not to be had, and TransportError where no host is.
    What has a body is for clusters without a scheduler, whose jobs neither queue nor are accounted.
    """

    transport: Transport
    clock: Clock
    script_name: str  # the file name of a job's script
    id_pattern: re.Pattern[str]
    id_example: str

    def check_id(self, text: str) -> None:
        """Raises UsageError unless ``text`` is the id of a job as it is written here."""
        if not self.id_pattern.fullmatch(text):
            raise UsageError(
                f"{text!r} is not a job id",
                code="not-a-job-id",
                fix=f"give one such as {self.id_example}; `clusterctl jobs` lists them",
            )

    def unknown(self, ids: Sequence[str]) -> SchedulerError:
        """The error for ids that it does not know."""
        what = f"there is no job {ids[0]}" if len(ids) == 1 else f"there are no jobs {', '.join(ids)}"
        return SchedulerError(what, code="unknown-job", fix="`clusterctl jobs` lists the jobs there are")

    def reject_if_busy(self) -> None:
        """Raises SchedulerError if a job would neither start nor wait in a queue."""
        return

    def submit(self, request: JobRequest) -> str:
        """Start a job, or queue it; its id.

        Raises:
            AnswerLostError: it may have been taken.
            SchedulerError: it was refused; of Slurm its words, and the valid choices where they are known.
            UnreachableError: it was not submitted.
        """

    def jobs(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        """The jobs of these ids, without those that are not known; a UsageError where one is no id."""

    def own_jobs(self) -> tuple[JobInfo, ...]:
        """The jobs of this user that wait, run, or lately ended."""

    def all_jobs(self) -> tuple[JobInfo, ...]:
        """The jobs of all users that wait, run, or lately ended, as far as this user may see them."""

    def nodes(self) -> tuple[NodeInfo, ...]:
        """All nodes, as far as this user may see them."""

    def nodes_and_jobs(self) -> tuple[tuple[NodeInfo, ...], tuple[JobInfo, ...]]:
        """What ``nodes`` and ``all_jobs`` say."""
        return self.nodes(), self.all_jobs()

    def by_token(self, token: str, submitted_at: float) -> JobInfo | None:
        """The job of this user's submission; ``submitted_at``: Unix seconds, by our clock."""

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs, which are not requeued; ask ``jobs`` first."""

    def steps(self, job_id: str) -> tuple[StepInfo, ...]:
        """What the accounting says of a job's steps; none where there is no accounting."""
        return ()

    def accounting(self, job_id: str) -> str | None:
        """What the accounting says of a job, as JSON; None where there is no accounting."""
        return None

    def version(self) -> str | None:
        """Its version, such as ``22.05.8``; None where there is no such program."""
        return None


@runtime_checkable
class Nodes(Jobs, Protocol):
    """What an operator may do besides. A cluster without a scheduler has no such thing."""

    def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Drain these nodes: running jobs go on, no new ones start."""

    def resume(self, nodes: Sequence[str]) -> None:
        """Resume drained nodes."""

    def run_verification_job(self, hosts: tuple[str, ...]) -> Result:
        """Run the payload's probe, a rank on each of these hosts. It ends by itself if it hangs."""

    def release_held_jobs(self) -> tuple[str, ...]:
        """Let jobs that a node failed to launch wait for nodes again; their ids."""

    def reconfigure(self) -> None:
        """Have all daemons read their configuration again."""

    def annotate(self, job_id: str, text: str) -> None:
        """Set a job's admin comment, such as why it ends."""


def active_jobs(scheduler: Jobs) -> tuple[JobInfo, ...]:
    """All users' jobs that wait or run, as far as this user may see them."""
    return tuple(job for job in scheduler.all_jobs() if not job.ended)
