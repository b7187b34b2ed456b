"""Interface to the scheduler: Slurm, or mpirun over SSH without Slurm. Job states have Slurm's
names.
"""

# ruff: noqa: ARG002 - methods with a body are defaults for clusters without Slurm

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from clusterctl.errors import (
    AnswerLostError,
    ClusterctlError,
    SchedulerError,
    SlurmError,
    TransportError,
    UsageError,
)
from clusterctl.scheduler.history import LOST, Alarm, Hang
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.ledger import JobEntry
from clusterctl.transport.base import Transport
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock

if TYPE_CHECKING:
    from clusterctl.scheduler.slurm.parse import PartitionInfo
    from clusterctl.scheduler.slurm.trial import SbatchTrial
    from clusterctl.spec.sbatch import Directive

_UNUSABLE = frozenset(
    "DOWN DRAIN DRAINED DRAINING FAIL ERROR UNKNOWN NOT_RESPONDING MAINT POWERED_DOWN FUTURE".split()
)
# Reasons of pending jobs whose nodes are out of service. Some versions of Slurm write _ instead of
# spaces.
_NODES_OUT = re.compile(
    r"ReqNodeNotAvail(?!.*[Rr]eserved)|UnavailableNodes|Nodes.required.for.job.are.DOWN"
)
# Reasons of pending jobs that never start, unless a person changes the job, its limits or the
# cluster.
_STUCK = re.compile(
    r"DependencyNeverSatisfied|BadConstraints|Partition(Config|TimeLimit|NodeLimit)|JobHeld(User|Admin)"
    r"|JobHoldMaxRequeue|job.requeued.in.held.state|user.env.retrieval.failed.requeued.held"
    r"|(QOS|Assoc)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+|MaxMemPerLimit"
    r"|(Account|QOS)NotAllowed|Invalid(Account|QOS)|Reservation(Deleted|Invalid)"
)
_HELD = re.compile(r"launch.fail.*requeued.held")
_MARKS = "*~#!%$@^-"  # sinfo(1)

_T = TypeVar("_T")

# Prefix of the comment of jobs submitted by clusterctl. The job's token follows.
_MARK = "clusterctl:"


def comment_of(token: str) -> str:
    """Return the Slurm comment for a job with this token, to find the job if sbatch's answer is
    lost.
    """
    return _MARK + token


class Outcome(Enum):
    """Result of a job. GOES_ON: the job has not ended."""

    GOES_ON = "goes on"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobState(StrEnum):
    """Slurm's base states (squeue(1), JOB STATE CODES), and two states of clusterctl.

    UNKNOWN: Slurm's state is not in this list. PURGED: Slurm no longer has a record of the job.
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
# States in which a job has not ended. A run that is collected then is only a snapshot.
GOING_ON: Final = frozenset(state.value for state in JobState if state.outcome is Outcome.GOES_ON)


def has_final_run(entry: JobEntry) -> bool:
    """Return whether the run of a job was collected after the job had ended."""
    return entry.run_dir is not None and entry.run_state not in GOING_ON


# In these states, a job's own exit code or signal has ended it.
_BY_ITSELF: Final = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.OUT_OF_MEMORY})
# From these states a job goes to RUNNING without having run. Such a job may have no nodes yet.
BEFORE_START: Final = frozenset(
    {
        JobState.PENDING,
        JobState.CONFIGURING,
        JobState.REQUEUED,
        JobState.REQUEUE_HOLD,
        JobState.REQUEUE_FED,
        JobState.SPECIAL_EXIT,
        JobState.RESV_DEL_HOLD,
    }
)


# Slurm's signal of a task whose log slurmstepd could not open: `IO setup failed` of _fork_all_tasks
# in src/slurmd/slurmstepd/mgr.c. No process gets it.
NO_LOG_SIGNAL: Final = 53
# Slurm's signal of a job with a process that the kernel has killed for its memory: SIG_OOM (253) of
# src/common/slurm_protocol_defs.h, of which the record keeps seven bits.
_MEMORY_SIGNAL: Final = 125
# Slurm's reason of a job that a signal has ended, such as ``RaisedSignal:9(Killed)``.
_RAISED: Final = re.compile(r"RaisedSignal:(\d+)(?:\(.*\))?")


def reason_in_words(reason: str) -> str:
    """Return Slurm's reason for a job's state, with signals by name. "": Slurm gives no reason."""
    if reason == "None":
        return ""
    if (raised := _RAISED.fullmatch(reason)) is None:
        return reason
    number = int(raised[1])
    if number == NO_LOG_SIGNAL:
        return "slurmstepd could not open the job's log"
    return f"ended by {format_exit(None, number)}"


def format_exit(exit_code: int | None, number: int | None) -> str:
    """Return the name of the signal that ended a job, otherwise its exit code. "" if both are
    unknown.
    """
    if not number:
        return "" if exit_code is None else str(exit_code)
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signal
        return f"signal {number}"


def own_exit(state: JobState, exit_code: int, number: int) -> tuple[int | None, int | None]:
    """Return the exit code and the signal of a job that has ended by itself; None: unknown.

    Of a job that Slurm has ended, slurmctld has the code of the batch script that it stopped, such
    as 143, and the accounting has 0. So neither counts, in any source. A job that has failed did not
    end with 0: its code is then unknown.

    exit_code, number: of the exit and of the signal, as the scheduler tells them.
    """
    if state not in _BY_ITSELF:
        return None, None
    if number == _MEMORY_SIGNAL:
        return None, signal.SIGKILL.value
    if number:
        return None, number
    return (None, None) if state is not JobState.COMPLETED and not exit_code else (exit_code, 0)


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """A job, or a task of a job array.

    SQUEUE_VALUES and SACCT_VALUES (slurm_parse.py) say where Slurm's values come from; COLUMNS
    (cli/jobs.py) and ``Ending.facts`` show them to people, ``as_dict`` to programs.

    Times are Unix seconds. Fields without a value, such as the exit code of an active job, are
    None.
    slurm_id: the number that Slurm itself gives the job or task (SLURM_JOB_ID), if it is known.
    number: 0 if the scheduler's record is damaged. prefix: "m" if the cluster has no scheduler,
        else "".
    exit_code, signal: see ``own_exit``. signal: 0 if no signal ended the job.
    expected_start: Slurm's estimate for a pending job.
    tres: resources allocated or requested, as Slurm writes them: ``cpu=2,mem=200M,node=1``.
    suspended_s: seconds for which Slurm had stopped the job, in its last attempt.
    attempts: as far as they are known. start_time: of the last or, after ``with_all_attempts``, of
        the first.
    hang: set by ``with_hangs`` (jobs/events.py) if the job is running without progress. alarms: the
        lasting alarms, set in the same way.
    steps: of the last attempt, by the accounting: the first is the job itself. None: not asked for.
    """

    slurm_id: int | None = field(default=None, compare=False)
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
    expected_start: int | None = None
    work_dir: str = ""
    comment: str = ""
    restarts: int | None = None
    suspended_s: int = field(default=0, compare=False)
    prefix: str = ""
    attempts: tuple[AttemptRecord, ...] = ()
    hang: Hang | None = None
    alarms: tuple[Alarm, ...] = ()
    steps: tuple[StepInfo, ...] | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the job as printed by `-o json`: its values, with times as Unix seconds."""
        values = {
            each.name: plain(getattr(self, each.name))
            for each in fields(self)
            if each.name not in _NOT_IN_JSON
        }
        return {
            "job_id": self.id,
            **values,
            "elapsed_s": self.elapsed_s,
            "exit": self.exit,
        }

    @property
    def id(self) -> str:
        """Job id: ``12``, ``12_3`` for an array task, ``m12`` on a cluster without a scheduler."""
        return self.whole_id if self.task is None else f"{self.whole_id}_{self.task}"

    @property
    def elapsed_s(self) -> int | None:
        """Seconds of all known attempts, until now by the local clock if the job runs. None: the
        job has not started.
        """
        now = int(time.time())
        attempts = self.known_attempts
        return sum(attempt.seconds_until(now) for attempt in attempts) if attempts else None

    @property
    def known_attempts(self) -> tuple[AttemptRecord, ...]:
        """The attempts or, if they are unknown, the last by the times of the job."""
        if not self.start_time:
            return self.attempts
        last = AttemptRecord(start_time=self.start_time, end_time=self.end_time, nodes=self.nodes)
        *earlier, last = self.attempts or [last]
        # The accounting has the time for which a job is suspended only when it runs again.
        suspended_s = max(self.suspended_s, last.suspended_s)
        return (*earlier, replace(last, suspended_s=suspended_s))

    @property
    def node_hours(self) -> float:
        """Of all attempts that have ended. A shared node counts in full."""
        return sum(len(each.nodes) * each.seconds for each in self.known_attempts) / 3600

    @property
    def all_nodes(self) -> tuple[str, ...]:
        """The nodes of all attempts."""
        own = (node for attempt in self.attempts for node in attempt.nodes)
        return tuple(dict.fromkeys((*own, *self.nodes)))

    @property
    def first_start(self) -> int | None:
        """Start of the first attempt, in Unix seconds."""
        return self.attempts[0].start_time if self.attempts else self.start_time

    @property
    def last_start(self) -> int | None:
        """Start of the last attempt, in Unix seconds."""
        return self.attempts[-1].start_time if self.attempts else self.start_time

    @property
    def exit(self) -> str:
        """Name of the signal that ended the job, otherwise its exit code. "" if both are
        unknown.
        """
        return format_exit(self.exit_code, self.signal)

    @property
    def whole_id(self) -> str:
        """Id of the job. For a task of a job array: id of the array."""
        return f"{self.prefix}{self.number}"

    @property
    def token(self) -> str:
        """Token that identifies the submission; "" if clusterctl did not submit the job."""
        return self.comment.removeprefix(_MARK) if self.comment.startswith(_MARK) else ""

    @property
    def outcome(self) -> Outcome:
        return self.state.outcome

    @property
    def lacks_nodes(self) -> bool:
        """Whether the job waits for nodes that are out of service, not only for busy nodes."""
        return self.state is JobState.PENDING and _NODES_OUT.search(self.reason) is not None

    @property
    def failed_to_launch(self) -> bool:
        """Whether Slurm holds the job because a node could not start the job."""
        return self.state is JobState.PENDING and _HELD.search(self.reason) is not None

    @property
    def is_stuck(self) -> bool:
        """Whether the job never starts, unless a person changes the job, its limits or the
        cluster.
        """
        return self.state is JobState.PENDING and _STUCK.fullmatch(self.reason) is not None

    @property
    def ended(self) -> bool:
        return self.outcome is not Outcome.GOES_ON


# Values of a job with which only clusterctl itself works. job_id has the number and the task.
_NOT_IN_JSON: Final = frozenset(
    "slurm_id number task expected_start comment restarts prefix suspended_s steps".split()
)


def plain(value: object) -> object:
    """Return a value of a job or of its activity in its JSON form."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (Alarm, Hang)):
        return value.as_dict()
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return value


@dataclass(frozen=True)
class NodeInfo:
    """A node of the cluster, as the scheduler reports it.

    shown: the node's state as sinfo prints it: ``idle+drain*``. allocated_mib: memory allocated to
        jobs; None: unknown. allocated_cpus, gres_used: likewise.
    load: mean number of processes that ran or could run in the last minute; None: unknown.
    reason_by: account that set the reason. Slurm's daemons use slurm or root.
    """

    name: str
    shown: str
    reason: str
    cpus: int
    memory_mib: int
    gres: str
    partitions: tuple[str, ...]
    reason_by: str = ""
    allocated_mib: int | None = 0
    allocated_cpus: int | None = 0
    load: float | None = None
    gres_used: str = ""

    @property
    def state(self) -> str:
        """Base state without flags, such as ``IDLE``."""
        return self.shown.partition("+")[0].rstrip(_MARKS).upper()

    @property
    def flags(self) -> tuple[str, ...]:
        """Slurm's flags, such as ``DRAIN``. A ``*`` in ``shown`` counts as NOT_RESPONDING."""
        named = tuple(word.rstrip(_MARKS).upper() for word in self.shown.split("+")[1:])
        return (
            (*named, "NOT_RESPONDING")
            if "*" in self.shown and "NOT_RESPONDING" not in named
            else named
        )

    @property
    def usable(self) -> bool:
        """Whether Slurm would start a job on the node, now or when the node is free."""
        return not _UNUSABLE & {self.state, *self.flags}

    @property
    def is_lost(self) -> bool:
        """Whether the node does not answer, or is down, so that Slurm ends its jobs."""
        return not LOST.isdisjoint({self.state, *self.flags})


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A job step in Slurm's accounting. The first step is the job itself.

    cancelled_by: uid of the user that cancelled the step, or "".
    peak, peak_host, peak_task: largest memory of a task, in bytes, its node and its number in the
        step.
    """

    id: str
    cancelled_by: str = ""
    peak: int = 0
    peak_host: str = ""
    peak_task: int | None = None


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to submit. folder: the job's folder on the cluster. script: name of the job script in
    it.

    submitted_at: Unix seconds by the local clock.
    options: those for Slurm in the script, which an error names.
    nodes, limit_s (0: no limit): used only on clusters without a scheduler. Slurm reads them in the
    script.
    """

    token: str
    name: str
    folder: str
    script: str
    partition: str = ""
    nodes: tuple[str, ...] = ()
    limit_s: int = 0
    submitted_at: float = 0.0
    options: tuple[Directive, ...] = ()


class AccountingAwayError(SchedulerError, code="accounting-away", retryable=True):
    """Slurm's accounting did not answer. A later command may succeed. queued: the requested jobs
    that the queue has.
    """

    queued: tuple[JobInfo, ...] = ()

    def of_job(self, job_id: str) -> AccountingAwayError:
        """Return the error for a job that the queue does not have."""
        message = f"job {job_id} is not in Slurm's queue, and Slurm's accounting does not answer"
        return AccountingAwayError(message, why=self.why, fix=self.fix)


def unmanaged_job_error(job: JobInfo, user: str) -> SchedulerError:
    """Return the error about a job whose files are unknown to the calling user, ``user``."""
    if job.user != user:
        return SchedulerError(
            f"job {job.id} belongs to user {job.user}",
            code="not-yours",
            about="user",
            why=f"user {user} can neither read its files nor start programs in it",
            fix=f"ask {job.user}; `clusterctl jobs {job.id}` shows its state",
        )
    return SchedulerError(
        f"job {job.id} was not submitted by clusterctl",
        code="not-yours",
        about="job",
        why="clusterctl knows the files only of jobs that it submitted",
        fix=f"look for the job's files in its working directory, {job.work_dir}, with "
        "`clusterctl ssh`",
    )


def unknown_or_task(asked: str, jobs: Sequence[JobInfo], unknown: SchedulerError) -> SchedulerError:
    """Return the error for an id that no job has: ``unknown``, unless it is Slurm's number of a
    task.

    jobs: the scheduler's answer to the id.
    """
    task = next((job for job in jobs if job.task is not None and str(job.slurm_id) == asked), None)
    if task is None or asked in {task.id, task.whole_id}:
        return unknown
    return SchedulerError(
        f"{asked} is Slurm's own number of task {task.id}",
        code="option-invalid",
        about="task-number",
        fix=f"use {task.id}",
    )


@contextmanager
def refusing_wrong_ids(argument: str) -> Iterator[None]:
    """If the `with` block finds that the cluster lacks the job that an argument of `submit` names,
    raise UsageError.

    An error of a scheduler that gives no usable answer is unchanged.
    """
    try:
        yield
    except (SlurmError, AccountingAwayError):
        raise
    except SchedulerError as exc:
        raise UsageError(
            f"{argument}: {exc.what}",
            code=exc.code,
            about=exc.about,
            why=exc.why,
            fix=exc.fix,
        ) from exc


def worst_job(jobs: Sequence[JobInfo]) -> JobInfo:
    """Return the first job with the worst outcome. From worst to best: failed, cancelled, active,
    completed.
    """
    return min(jobs, key=lambda job: badness(job.state))


def badness(state: JobState | None) -> int:
    """Return 0 for the worst outcome. None: a state that is not known."""
    order = (Outcome.FAILED, Outcome.CANCELLED, Outcome.GOES_ON, Outcome.COMPLETED)
    return order.index(state.outcome if state else Outcome.GOES_ON)


def elapsed_of(tasks: Sequence[JobInfo]) -> int | None:
    """Return the seconds of a job, or of an array.

    Of a job or a single task, also of an array that has no other: the seconds of all attempts,
    without suspended time. Of several tasks: from the first start of a task to the last end.
    While a task waits or runs, until now by the local clock. None: no task has started.
    """
    if len(tasks) == 1:
        return tasks[0].elapsed_s
    started = [task for task in tasks if task.first_start is not None]
    if not started:
        return None
    first = min(task.first_start or 0 for task in started)
    if all(task.ended for task in tasks):
        last = max(task.end_time or first for task in started)
    else:
        last = int(time.time())
    return max(0, last - first)


def state_counts(tasks: Sequence[JobInfo]) -> str:
    """Return the number of tasks in each state as text: ``3 COMPLETED, 1 RUNNING``."""
    return ", ".join(
        f"{count} {state}" for state, count in Counter(job.state.value for job in tasks).items()
    )


def retry(clock: Clock, patience_s: float, ask: Callable[[], _T]) -> _T:
    """Return the result of ``ask``. After a retryable error, call it again, for up to
    ``patience_s`` s.
    """
    for _ in clock.polls(patience_s, first_s=0.5, longest_s=5.0):
        try:
            return ask()
        except ClusterctlError as exc:
            if not exc.retryable:
                raise
            error = exc
    raise error


def find_lost_job(scheduler: Jobs, request: JobRequest, cause: ClusterctlError) -> str:
    """Return the id of a job whose submission ended with the error ``cause``, if the scheduler has
    the job.

    Otherwise, or if the scheduler does not answer, raise AnswerLostError.
    """
    with suppress(SchedulerError, TransportError):
        if (job := scheduler.by_token(request.token, request.submitted_at)) is not None:
            return job.whole_id
    raise AnswerLostError(
        "it is unknown whether the scheduler accepted the job",
        where=scheduler.transport.host,
        why=cause.why or cause.what,
        fix="before submitting again, check `clusterctl jobs`: the job is listed if it was "
        "accepted",
        host=scheduler.transport.host,
    ) from cause


class Jobs(Protocol):
    """Interface for users of a cluster: run jobs, list jobs and nodes. transport: access to the
    controller.

    All methods raise SchedulerError if the scheduler gives no usable answer, TransportError if a
    host is unreachable. Methods with a body are defaults for clusters without a scheduler, queue
    and accounting.
    """

    transport: Transport
    clock: Clock
    patience_s: float
    script_name: str  # a file name
    id_pattern: re.Pattern[str]
    id_example: str

    def check_id(self, text: str) -> None:
        """Raise UsageError unless ``text`` is a valid job id on this cluster."""
        if not self.id_pattern.fullmatch(text):
            raise UsageError(
                f"{text!r} is not a job id",
                about="job-id",
                fix=f"use an id such as {self.id_example}; `clusterctl jobs` lists them",
            )

    def unknown(self, ids: Sequence[str]) -> SchedulerError:
        """Return the error for ids of jobs that do not exist."""
        message = (
            f"there is no job {ids[0]}" if len(ids) == 1 else f"there are no jobs {', '.join(ids)}"
        )
        return SchedulerError(
            message, code="not-found", about="job", fix="`clusterctl jobs` lists the jobs"
        )

    def reject_if_busy(self) -> None:
        """Raise SchedulerError if a job could neither start now nor wait in a queue."""
        return

    def submit(self, request: JobRequest) -> str:
        """Start or queue a job and return its id.

        Raises:
            AnswerLostError: the scheduler may or may not have accepted the job.
            SchedulerError: the scheduler refused the job. The error has Slurm's message and a fix.
            UnreachableError: the job was not submitted.
        """

    def jobs(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        """Return the jobs with these ids; leave unknown ids out.

        Raises:
            UsageError: an id is invalid.
            AccountingAwayError: the accounting does not answer, and the queue lacks some of the
                jobs.
        """

    def own_jobs(self) -> tuple[JobInfo, ...]:
        """Return this user's pending, running and recently ended jobs."""

    def all_jobs(self) -> tuple[JobInfo, ...]:
        """Return all users' pending, running and recently ended jobs that this user may see."""

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return all nodes that this user may see."""

    def nodes_and_jobs(self) -> tuple[tuple[NodeInfo, ...], tuple[JobInfo, ...]]:
        """Return the results of ``nodes`` and ``all_jobs``. With Slurm, this takes a single round
        trip.
        """
        return self.nodes(), self.all_jobs()

    def partitions_and_own_jobs(self) -> tuple[tuple[PartitionInfo, ...], tuple[JobInfo, ...]]:
        """Return the partitions and the result of ``own_jobs``. With Slurm, this takes a single
        round trip.
        """
        return (), self.own_jobs()

    def nodes_out_of_service(self) -> tuple[NodeInfo, ...]:
        """Return the nodes that start no jobs, with the scheduler's reasons."""
        return tuple(node for node in self.nodes() if not node.usable)

    def accounts(self, user: str) -> tuple[str, ...]:
        """Return the accounts of a user's jobs; () if there is no accounting, or it lists none."""
        return ()

    def trial(self, script: str) -> SbatchTrial | None:
        """Return whether Slurm would accept a job script, and when the job would start; None on a
        cluster without Slurm. Nothing is submitted.
        """
        return None

    def by_token(self, token: str, submitted_at: float) -> JobInfo | None:
        """Return the job with this token in its comment, or None. submitted_at: local clock, Unix
        seconds.
        """

    def cancel(self, ids: Sequence[str]) -> Mapping[str, ClusterctlError]:
        """Cancel jobs so that they are not requeued. Call ``jobs`` first to check the ids.

        Return id -> error of the jobs that could not be cancelled.
        """

    def run_in_job(self, job: JobInfo, argv: Sequence[str]) -> Result:
        """Run a command on the first node of a running job, as the job's user. It takes no
        resources.
        """

    def lost_nodes(self, jobs: Sequence[JobInfo]) -> Mapping[str, Mapping[str, str]]:
        """Return ID -> node -> reason, for the nodes of jobs that stopped answering while the job
        ran.
        """
        return {}

    def unfit_nodes(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return node -> its unmet need, for the nodes of these that their health check has
        drained.
        """
        return {}

    def required_nodes(self) -> dict[int, tuple[str, ...]]:
        """Return number of a waiting job -> the nodes that it asks for by name. Other jobs are left
        out.
        """
        return {}

    def accounting(self, ids: Sequence[str]) -> Mapping[str, str] | None:
        """Return the accounting records of jobs as JSON, by the jobs' whole IDs, or None on a cluster
        without accounting. A job that the accounting does not have is left out.
        """
        return None

    def accounted(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        """Return jobs and tasks of arrays with all ``attempts`` and their ``steps`` in the
        accounting; () without accounting.
        """
        return ()

    def jobs_in_full(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        """Return the result of ``jobs``, with what ``accounted`` tells of each job. With Slurm, this
        takes a query of the queue and one of the accounting, however many jobs there are.
        """
        return self.jobs(ids)

    def history(self, since: int) -> tuple[JobInfo, ...] | None:
        """Return the jobs of all users in the accounting that ran since then (Unix seconds), as far
        as this user may see them; None without accounting.
        """
        return None

    def accounting_failure(self) -> str:
        """Return why the accounting does not answer; "" if it answers or the cluster has no
        accounting.
        """
        return ""

    def version(self) -> str | None:
        """Return the scheduler's version, such as ``22.05.8``, or None on a cluster without a
        scheduler.
        """
        return None


class Nodes(Jobs, Protocol):
    """Interface for administrators. Methods with a body are defaults for clusters without Slurm.

    drains_nodes: whether nodes can be taken out of service while others run jobs.
    """

    drains_nodes: bool

    def drain(self, nodes: Sequence[str], reason: str) -> tuple[str, ...]:
        """Drain these nodes: running jobs continue, no new jobs start. Return the drained nodes."""
        return ()

    def set_down(self, nodes: Sequence[str], reason: str) -> None:
        """Set these nodes down: their jobs end, and Slurm requeues the jobs that allow it."""
        return

    def resume(self, nodes: Sequence[str]) -> None:
        """Resume nodes that are drained or down."""
        return

    def run_verification_job(self, hosts: tuple[str, ...]) -> Result:
        """Run an MPI test (the program ``probe``) with a rank on each host. Kill the test if it
        hangs.
        """

    def release_held_jobs(self) -> tuple[str, ...]:
        """Release jobs that Slurm holds because a node could not launch the job. Return the jobs'
        ids.
        """
        return ()

    def reconfigure(self) -> None:
        """Make all daemons of Slurm read their configuration files again."""
        return
