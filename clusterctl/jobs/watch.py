"""Wait for jobs, follow a job's output, and report how jobs ended.

Waiting sends a single query for all jobs, at growing intervals.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

from clusterctl.errors import (
    ClusterctlError,
    Failure,
    JobCancelledError,
    JobFailedError,
    JobStuckError,
    Notice,
    SchedulerError,
    TransportError,
    TunnelRefusedError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
    printable,
)
from clusterctl.jobs.events import (
    QueryTimer,
    requeue_grace_s,
    restarts_of_job,
    with_attempts,
    with_hangs,
)
from clusterctl.jobs.messages import TELLS_NOBODY, JobMessages
from clusterctl.scheduler.base import (
    AccountingAwayError,
    JobInfo,
    JobState,
    Outcome,
    state_counts,
    unknown_or_task,
    unmanaged_job_error,
    worst_job,
)
from clusterctl.scheduler.ends.diagnosis import Diagnosis, lines_of_tasks, notices_of
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.records import remember_states
from clusterctl.transport.base import Transport, remote_argv, split_lines
from clusterctl.util.progress import LineReporter, backoff

# Called with the jobs that changed and with all jobs.
OnChange = Callable[[Sequence[JobInfo], Sequence[JobInfo]], None]

# After sbatch has answered, the accounting may not know the job for this long.
_APPEAR_S = 30.0
_RECONNECT_S = 60.0
# Slurm may report such a reason for a moment, for example while `up` changes a partition.
_STUCK_S = 10.0

_PROGRAM = "clusterctl.jobs.remote_follow"
_LOG = re.compile(
    r"(?:task-(?P<folder>[0-9]+)/)?"
    r"(?:(?P<stream>stdout|stderr)(?:-(?P<task>[0-9]+))?|rank-logs/(?P<rank>[0-9]+))\.log"
)
_ERRORS: Mapping[Outcome, type[ClusterctlError]] = {
    Outcome.FAILED: JobFailedError,
    Outcome.CANCELLED: JobCancelledError,
    Outcome.GOES_ON: JobStuckError,
}
# The longest interval between two queries for a job that is followed.
LONGEST_PAUSE_S = 5.0


class _Watched:
    """The jobs that a caller waits for, with their latest known states."""

    def __init__(
        self, session: Session, ids: Sequence[str], on_change: OnChange, timeout_s: float | None
    ) -> None:
        self._session = session
        self._ids = tuple(ids)
        self._on_change = on_change
        self._clock = session.scheduler.clock
        self._timeout_s = timeout_s
        self.deadline = None if timeout_s is None else self._clock.now() + timeout_s
        self._unknown_until = self._clock.now() + _APPEAR_S
        self._stuck_since: float | None = None
        self.seen: dict[str, JobInfo] = {}
        self._turn = QueryTimer(session)
        # Job ID -> time of the clock.
        self._may_be_requeued_until: dict[str, float] = {}

    def poll(self) -> tuple[JobInfo, ...] | None:
        """Query jobs, and report changes. Return them if all have ended or are stuck, else None."""
        if not self._turn.is_due(self.seen.values()):
            return None
        try:
            jobs = self._session.scheduler.jobs(self._ids)
        except AccountingAwayError as exc:
            # The queue forgets ended tasks of an array, and may still have the rest.
            jobs = exc.queued
            if all(job.ended for job in jobs):
                raise
        jobs = (with_attempts if all(job.ended for job in jobs) else with_hangs)(
            self._session, jobs
        )
        self._note_killed(jobs)
        previous = {job_id: reported_state(job) for job_id, job in self.seen.items()}
        self.seen |= {job.id: job for job in jobs}
        if changed := [job for job in jobs if previous.get(job.id) != reported_state(job)]:
            self._on_change(changed, jobs)
        missing = [i for i in self._ids if not any(i in (job.id, job.whole_id) for job in jobs)]
        if missing:
            if self._clock.now() > self._unknown_until:
                raise self._session.unknown(missing)
            return None
        if all(job.ended for job in jobs):
            if self._may_be_requeued():
                return None
            own_jobs = (job for job in jobs if job.whole_id in self._ids)
            remember_states(self._session.ledger, own_jobs)
            return jobs
        return jobs if self._are_stuck([job for job in jobs if not job.ended]) else None

    def _are_stuck(self, active: Sequence[JobInfo]) -> bool:
        """Return whether no active job could start for the last ``_STUCK_S``, or ever will."""
        now = self._clock.now()
        if not all(job.is_stuck for job in active):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since is not None and now - self._stuck_since >= _STUCK_S

    def _note_killed(self, jobs: Sequence[JobInfo]) -> None:
        """Note until when the controller's watcher may requeue the jobs that were killed."""
        for job in jobs:
            grace_s = requeue_grace_s(job)
            if not grace_s:
                self._may_be_requeued_until.pop(job.id, None)
            elif job.id not in self._may_be_requeued_until:
                self._may_be_requeued_until[job.id] = self._clock.now() + grace_s

    def _may_be_requeued(self) -> bool:
        now = self._clock.now()
        return any(now < until for until in self._may_be_requeued_until.values())

    def pause(self, seconds: float) -> None:
        self.check_deadline()
        remaining = (
            seconds if self.deadline is None else min(seconds, self.deadline - self._clock.now())
        )
        self._clock.sleep(max(0.0, remaining))

    def check_deadline(self) -> None:
        if self.deadline is None or self._clock.now() < self.deadline:
            return
        job_id = self._ids[0]
        subject = (
            f"job {job_id} has" if len(self._ids) == 1 else f"jobs {', '.join(self._ids)} have"
        )
        active = [job for job in self.seen.values() if not job.ended]
        waiting = judge(self._session, [job for job in active if job.state is JobState.PENDING])
        causes = {job_id: f": {each.cause}" for job_id, each in waiting.items()}
        states = [Ending.of([job]).line + causes.get(job.id, "") for job in self.seen.values()]
        end = f"`clusterctl cancel {job_id}` ends it; without that, it"
        problem = f"{subject} not ended within {self._timeout_s:g} s"
        fix = (
            f"`clusterctl logs {job_id} -f` shows the output of a running job, {end} keeps running"
        )
        if {job.state for job in active} == {JobState.COMPLETING}:
            fix = (
                "the programs have ended, or Slurm ends them, and it waits for the nodes to say so: "
                f"`clusterctl status` shows the nodes; {self._session.site.advice.repair}"
            )
        if active and len(waiting) == len(active):
            problem = f"{subject} not started within {self._timeout_s:g} s"
            fix = f"{next(iter(waiting.values())).fix}; {end} stays in the queue"
        error = WaitTimeoutError(problem, why="; ".join(states), fix=fix)
        error.jobs = tuple(self.seen.values())
        raise error


def reported_state(job: JobInfo) -> tuple[object, ...]:
    """Return the fields of a job of which each change is shown to the user."""
    hang = job.hang and job.hang.noticed
    alarms = [alarm.summary for alarm in job.alarms]
    # The accounting does not tell how often a job was restarted.
    restarts = 0 if job.ended else job.restarts or 0
    return (
        job.state,
        job.nodes,
        job.lacks_nodes,
        job.failed_to_launch,
        job.is_stuck,
        restarts,
        hang,
        alarms,
    )


@dataclass(frozen=True, slots=True)
class ChangeNotes:
    """Reports changes of jobs to the user, by calling ``note`` with each line, and by messages.

    log_is_shown: the user sees the jobs' logs, which have a line for each alarm.
    end_is_shown: the caller shows how the jobs have ended.
    """

    session: Session
    note: LineReporter
    telling: JobMessages = TELLS_NOBODY
    log_is_shown: bool = False
    end_is_shown: bool = False
    # (Job ID, kind, summary) of each alarm that was reported.
    _alarms: set[tuple[str, str, str]] = field(default_factory=set)

    def __call__(self, changed: Sequence[JobInfo], jobs: Sequence[JobInfo]) -> None:
        """Report the jobs that changed. ``jobs`` are all watched jobs."""
        is_end = self.end_is_shown and all(job.ended for job in jobs)
        for whole_id in dict.fromkeys(job.whole_id for job in changed):
            tasks = [job for job in jobs if job.whole_id == whole_id]
            if len(tasks) > 1 and not is_end:
                self.note(f"job {whole_id}: {state_counts(tasks)}")
            changed_tasks = [job for job in changed if job.whole_id == whole_id]
            for job in changed_tasks:
                self._report(job, array=len(tasks) > 1, is_end=is_end)
            if any(job.lacks_nodes for job in changed_tasks):
                hint = "`clusterctl status` shows why"
                self.note(f"job {whole_id} is waiting for nodes that are out of service: {hint}")
        self.telling.look(self.session, jobs)
        for failure in self.telling.failures():
            self.note(failure)

    def _report(self, job: JobInfo, *, array: bool, is_end: bool) -> None:
        """Report a job. Tasks of an array are reported only if they failed or were cancelled. is_end:
        the caller shows how the job has ended.
        """
        if not array and job.ended and job.restarts:
            for attempt in restarts_of_job(self.session, job):
                self.note(f"job {job.id}: {attempt}")
        if job.hang:
            self.note(Notice("job-hangs", f"job {job.id} hangs: {job.hang}"))
        elif job.alarms:
            for alarm in () if self.log_is_shown else job.alarms:
                if (key := (job.id, alarm.kind, alarm.summary)) not in self._alarms:
                    self._alarms.add(key)
                    self.note(Notice("job-alarm", f"job {job.id}: {alarm}"))
        elif (not array and not is_end) or (
            array and job.outcome in {Outcome.FAILED, Outcome.CANCELLED}
        ):
            self.note(Ending.of([job]).line)
        if job.failed_to_launch:
            self.note(
                f"job {job.id} is held, as a node could not start it: "
                f"{self.session.site.advice.repair}"
            )


def wait(
    session: Session,
    ids: Sequence[str],
    *,
    timeout_s: float | None = None,
    on_change: OnChange = lambda *_: None,
) -> tuple[JobInfo, ...]:
    """Wait until all jobs have ended or can never start. An array's id selects all its tasks.

    Raises:
        WaitTimeoutError: ``timeout_s`` has passed. The jobs keep running, or stay in the queue.
        SchedulerError: a job is unknown, or the scheduler does not answer.
    """
    watched = _Watched(session, ids, on_change, timeout_s)
    for pause in backoff():
        jobs = watched.poll()
        if jobs is not None:
            return jobs
        watched.pause(pause)
    raise AssertionError("backoff never ends")


def follow(
    session: Session,
    job_id: str,
    *,
    on_output: OnOutput,
    rank: str = "",
    timeout_s: float | None = None,
    on_change: OnChange = lambda *_: None,
) -> tuple[JobInfo, ...]:
    """Pass on a job's output until the job has ended or can never start. Return the job, or an
    array's tasks. For a task of `submit --pack`, that is the job in which it runs.

    After a lost connection, reading resumes where it stopped, so no output is repeated or left out.

    on_output: called with each chunk of output.
    rank: see ``LogReader``.

    Raises:
        UnreachableError, TunnelRefusedError: the controller can't be reached for a long time.
        WaitTimeoutError, SchedulerError: see ``wait``.
    """
    watched = _Watched(session, [session.packed_job(job_id) or job_id], on_change, timeout_s)
    clock = session.scheduler.clock
    logs = JobLogs(session, job_id, rank)
    broken_since: float | None = None
    waits = backoff(first_s=0.5, longest_s=LONGEST_PAUSE_S)
    while True:
        polls = backoff(longest_s=max(LONGEST_PAUSE_S, session.site.pace.changed_s))
        next_poll = clock.now()
        try:
            with closing(logs.grow(watched.seen, watched.deadline)) as chunks:
                for chunk in chunks:
                    broken_since = None
                    waits = backoff(first_s=0.5, longest_s=LONGEST_PAUSE_S)
                    if chunk is not None:
                        on_output(chunk)
                    if clock.now() >= next_poll:
                        if (jobs := watched.poll()) is not None:
                            for last in logs.new(jobs):
                                on_output(last)
                            return jobs
                        next_poll = clock.now() + next(polls)
                    watched.check_deadline()
        except (UnreachableError, TunnelRefusedError) as exc:
            broken_since = broken_since or clock.now()
            may_help = isinstance(exc, UnreachableError) or exc.has_grace
            if not may_help or clock.now() >= broken_since + _RECONNECT_S:
                raise
            watched.pause(next(waits))


def judge(session: Session, jobs: Sequence[JobInfo]) -> Mapping[str, Diagnosis]:
    """Return, by the IDs of jobs and tasks, why they failed, were cancelled or wait, and what may be
    wrong with those that completed.
    """
    if not any(job.ended or job.state is JobState.PENDING for job in jobs):
        return {}
    # This import is slow.
    from clusterctl.scheduler.ends import judge as judging  # noqa: PLC0415

    return judging.judge(session, jobs)


def failures_of(jobs: Sequence[JobInfo], found: Mapping[str, Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return why jobs failed, then why they were cancelled, then why they wait."""
    order = (Outcome.FAILED, Outcome.CANCELLED, Outcome.GOES_ON)
    return tuple(
        found[job.id]
        for outcome in order
        for job in jobs
        if job.id in found and job.outcome is outcome
    )


def diagnosis_of(session: Session, jobs: Sequence[JobInfo]) -> Diagnosis | None:
    """Return why a job (or an array's worst task) failed, was cancelled or is pending, or what may be
    wrong although it completed; None: nothing is to be said.
    """
    return first_of(jobs, judge(session, jobs))


def first_of(jobs: Sequence[JobInfo], found: Mapping[str, Diagnosis]) -> Diagnosis | None:
    """Return the diagnosis of the job that ended worst; None: no job has a diagnosis."""
    own = (found[job.id] for job in jobs if job.id in found)
    return next(iter((*failures_of(jobs, found), *own)), None)


def raise_unless_completed(
    session: Session, jobs: Sequence[JobInfo], *, log_is_shown: bool = False
) -> list[Notice]:
    """Raise an error with the cause if a job failed, was cancelled or can never start. Else return
    what may be wrong all the same.

    jobs: the result of ``wait`` or ``follow``. log_is_shown: see ``raise_failures``.
    """
    found = judge(session, jobs)
    raise_failures(jobs, found, log_is_shown=log_is_shown)
    return notices_of(found.values())


def raise_failures(
    jobs: Sequence[JobInfo], found: Mapping[str, Diagnosis], *, log_is_shown: bool = False
) -> None:
    """Raise an error if there are failures of jobs.

    found: of ``jobs``, by ``judge``.
    log_is_shown: the job's log is on the screen already, so the error does not quote it.

    Raises:
        JobFailedError: a job failed.
        JobCancelledError: no job failed, and a job was cancelled or exceeded its time limit.
        JobStuckError: all other jobs completed, and a job can never start.
    """
    failures = failures_of(jobs, found)
    if not failures:
        return
    kind = _ERRORS[worst_job(jobs).outcome]
    infos = {job.id: job for job in jobs}
    ends = [Ending.of([infos[failure.job_id]], failure) for failure in failures]
    more = len(failures) - 1
    causes = lines_of_tasks({}, failures) if more else []
    error = kind(
        f"{ends[0].summary} (and {more} more)" if more else ends[0].summary,
        why="\n".join([*ends[0].details(log_is_shown=log_is_shown), *causes]),
        fix=ends[0].fix,
        failures=tuple(
            Failure(
                kind.code,
                "\n".join([end.summary, end.outcome, *end.log]),
                host=failure.host or None,
                fix=end.fix,
            )
            for end, failure in zip(ends, failures, strict=True)
        ),
    )
    error.answer = {"diagnosis": failures[0].as_dict()}
    raise error


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of a job's log, as the job wrote them. ``task`` is set for an array.

    A rank's log contains both streams. A chunk of this log has a ``rank``, and its ``stream`` is
    stdout.
    at: the number of bytes of the log before the chunk.
    """

    stream: Literal["stdout", "stderr"]
    task: int | None
    data: bytes
    rank: int | None = None
    at: int = field(default=0, compare=False)


OnOutput = Callable[[LogChunk], None]


@dataclass(slots=True)
class LogReader:
    """Reads new output from a job's logs or, if ``rank`` is a number or "all", from logs of ranks.

    ``gone``: the job's folder did not exist at the last read. ``unread``: why it could not be read
        then.
    most: the maximum number of bytes of the first read, at the end of each log. 0: all.
    """

    transport: Transport
    folder: str
    task: int | None = None
    rank: str = ""
    most: int = 0
    gone: bool = False
    unread: str = ""
    _offsets: dict[str, int] = field(default_factory=dict)

    def read(self, how: Literal["once", "follow"]) -> Generator[LogChunk | None, None, None]:
        """Yield the output since the last call. ``follow``: also wait for more output, without end.

        While waiting, yield None about once a second, so that the caller can check the job.

        Raises:
            TransportError: the connection was lost. The next call continues where this call
                stopped.
        """
        task = "" if self.task is None else str(self.task)
        argv = remote_argv(
            _PROGRAM, self.folder, how, json.dumps(self._offsets), task, self.rank, str(self.most)
        )
        with closing(self.transport.stream(argv)) as stream:
            for line in split_lines(stream, self._not_understood(b"a line does not end")):
                yield self._chunk(line)

    def _chunk(self, line: bytes) -> LogChunk | None:
        try:
            answer = json.loads(line)
            self.gone = "gone" in answer
            self.unread = printable(str(answer["unread"])) if "unread" in answer else ""
            if not answer or self.gone or self.unread:
                return None
            match = _LOG.fullmatch(answer["log"])
            data = base64.b64decode(answer["data"])
            self._offsets[answer["log"]] = int(answer["at"]) + len(data)
        except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as exc:
            raise self._not_understood(line) from exc
        if match is None:
            return None
        task = match["task"] or match["folder"]
        stream: Literal["stdout", "stderr"] = "stderr" if match["stream"] == "stderr" else "stdout"
        rank = int(match["rank"]) if match["rank"] else None
        return LogChunk(stream, int(task) if task else None, data, rank, int(answer["at"]))

    def _not_understood(self, line: bytes) -> TransportError:
        return TransportError(
            "the log reader on the cluster gave a malformed answer",
            code="internal",
            about="answer",
            where=self.transport.host,
            why=line[:200].decode(errors="replace").encode("unicode_escape").decode(),
            host=self.transport.host,
        )


class JobLogs:
    """The logs of a job on all hosts that have them. Each read continues the previous read."""

    def __init__(self, session: Session, job_id: str, rank: str = "", most: int = 0) -> None:
        session.scheduler.check_id(job_id)
        self._session = session
        self.task = int(job_id.partition("_")[2]) if "_" in job_id else None
        self.folder = folder_of(session, job_id)
        self._rank = rank
        self._most = most
        self._readers: dict[str, LogReader] = {}

    @property
    def gone(self) -> bool:
        return all(reader.gone for reader in self._readers.values())

    @property
    def unread(self) -> str:
        return next((reader.unread for reader in self._readers.values() if reader.unread), "")

    def new(self, jobs: Iterable[JobInfo]) -> Iterator[LogChunk]:
        """Yield new output. ``jobs``: their nodes are read if logs are on nodes' own disks."""
        for reader in self._readers_of(jobs):
            yield from (chunk for chunk in reader.read("once") if chunk is not None)

    def grow(
        self, latest_jobs: Mapping[str, JobInfo], deadline: float | None
    ) -> Generator[LogChunk | None, None, None]:
        # Callers may add jobs, and so nodes to read from, to ``latest_jobs`` between two chunks.
        if self._session.site.folders.are_one:
            (reader,) = self._readers_of(())
            yield from reader.read("follow")
        clock = self._session.scheduler.clock
        for pause in backoff(longest_s=LONGEST_PAUSE_S):
            yield from self.new(latest_jobs.values())
            yield None
            clock.sleep(pause if deadline is None else max(0.0, min(pause, deadline - clock.now())))

    def _readers_of(self, jobs: Iterable[JobInfo]) -> list[LogReader]:
        nodes = tuple(dict.fromkeys(node for job in jobs for node in job.nodes))
        return [
            self._readers.setdefault(
                host, LogReader(transport, self.folder, self.task, self._rank, self._most)
            )
            for host, transport in self._session.hosts_with_files(nodes)
        ]


def logs(
    session: Session, job_id: str, *, on_output: OnOutput, rank: str = "", most: int = 0
) -> None:
    """Pass the output so far to ``on_output``: that of the job, a rank, or all ranks (see
    ``LogReader``).

    most: the maximum number of bytes of each log, at its end. 0: all.

    Raises:
        SchedulerError: the job is unknown, clusterctl did not submit it, or its folder is gone or
            can't be read.
    """
    job_logs = JobLogs(session, job_id, rank, most)
    chunk = None
    whole_id = session.packed_job(job_id) or job_id
    jobs = () if session.site.folders.are_one else session.scheduler.jobs([whole_id])
    for chunk in job_logs.new(jobs):
        on_output(chunk)
    if job_logs.gone:
        raise SchedulerError(
            f"the folder of job {job_id} and its logs no longer exist",
            code="not-found",
            about="job-folder",
            where=f"{job_logs.folder} on the cluster",
            why="the job itself or a user removed the folder",
            fix="`clusterctl jobs` still shows how the job ended",
        )
    if job_logs.unread:
        raise SchedulerError(
            f"the logs of job {job_id} can't be read",
            code="file-unreadable",
            about="logs",
            where=f"{job_logs.folder} on the cluster",
            why=job_logs.unread,
            fix="make the folder readable, or run the command again when its file system answers",
        )
    if chunk is None and rank not in ("", "all", "0"):
        raise UsageError(
            f"job {job_id} has no log of rank {rank}",
            code="not-found",
            about="rank",
            why="the job has no such rank, has not started, or is a shell script, which starts "
            "its own ranks",
            fix=f"`clusterctl logs {job_id} --label` shows the existing ranks",
        )
    if chunk is None and job_logs.task is not None and not session.scheduler.jobs([whole_id]):
        raise session.unknown([job_id])


def folder_of(session: Session, job_id: str) -> str:
    """Return a job's folder on the cluster.

    Raises SchedulerError: clusterctl did not submit the job, or another user did, and the folder
        can't be read.
    """
    entry = session.ledger.find(job_id)
    if entry is not None and entry.remote_dir is not None:
        return entry.remote_dir
    jobs = session.scheduler.jobs([job_id])
    if not jobs:
        raise session.scheduler.unknown([job_id])
    folder = jobs[0].work_dir
    user = session.inventory.job_user
    is_readable = jobs[0].user == user or (
        session.transport.run(["test", "-x", folder], check=False).rc == 0
    )
    if not jobs[0].token or not is_readable:
        raise unknown_or_task(job_id, jobs, unmanaged_job_error(jobs[0], user))
    return folder
