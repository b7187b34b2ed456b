"""List and cancel jobs, wait for them, follow one as its output grows, and report how they ended.

One query is for all that are waited for, ever less often.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from clusterctl.errors import (
    ClusterctlError,
    Failure,
    JobCancelledError,
    JobFailedError,
    SchedulerError,
    TransportError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)
from clusterctl.scheduler.base import JobInfo, JobState, Outcome, state_counts, unmanaged_job, worst
from clusterctl.scheduler.session import Session, resolve_submissions
from clusterctl.transport.base import Transport, lines, remote_argv
from clusterctl.util.progress import LineReporter, backoff

if TYPE_CHECKING:
    from clusterctl.scheduler.diagnosis import Diagnosis

OnChange = Callable[[Sequence[JobInfo], Sequence[JobInfo]], None]  # those that changed, and all

_APPEAR_S = 30.0  # how long a job may be unknown: sbatch has answered, the accounting has not heard of it yet
_RECONNECT_S = 60.0

_PROGRAM = "clusterctl.jobs.remote_follow"
_LOG = re.compile(r"(stdout|stderr)(?:-([0-9]+))?\.log|(?:task-([0-9]+)/)?rank-logs/([0-9]+)\.log")
LONGEST_PAUSE_S = 5.0  # between two looks at a job that is followed


class _Watched:
    """The jobs that are waited for, in the state last seen."""

    def __init__(
        self, session: Session, ids: Sequence[str], on_change: OnChange, timeout_s: float | None
    ) -> None:
        self._session, self._ids, self._on_change = session, tuple(ids), on_change
        self._clock, self._timeout_s = session.scheduler.clock, timeout_s
        self.deadline = None if timeout_s is None else self._clock.now() + timeout_s
        self._unknown_until = self._clock.now() + _APPEAR_S
        self.seen: dict[str, JobInfo] = {}

    def look(self) -> tuple[JobInfo, ...] | None:
        """Ask Slurm; the jobs if all have ended, else None. Tells ``on_change`` what is new."""
        jobs = self._session.scheduler.jobs(self._ids)
        before = {job_id: reported(job) for job_id, job in self.seen.items()}
        self.seen |= {job.id: job for job in jobs}
        if changed := [job for job in jobs if before.get(job.id) != reported(job)]:
            self._on_change(changed, jobs)
        missing = [i for i in self._ids if not any(i in (job.id, job.whole_id) for job in jobs)]
        if missing:
            if self._clock.now() > self._unknown_until:
                raise self._session.scheduler.unknown(missing)
            return None
        if not all(job.ended for job in jobs):
            return None
        self._remember(jobs)
        return jobs

    def pause(self, seconds: float) -> None:
        """Sleep so long, or until the deadline."""
        self.check_deadline()
        left = seconds if self.deadline is None else min(seconds, self.deadline - self._clock.now())
        self._clock.sleep(max(0.0, left))

    def check_deadline(self) -> None:
        if self.deadline is None or self._clock.now() < self.deadline:
            return
        what = f"job {self._ids[0]} has" if len(self._ids) == 1 else f"jobs {', '.join(self._ids)} have"
        stand = (f"{j.id} is {j.state.value} ({j.reason or 'no reason given'})" for j in self.seen.values())
        raise WaitTimeoutError(
            f"{what} not ended within {self._timeout_s:g} s",
            why="; ".join(stand),
            fix=f"it goes on; `clusterctl logs {self._ids[0]} -f` follows it, `clusterctl cancel` ends it",
        )

    def _remember(self, jobs: Sequence[JobInfo]) -> None:
        for job_id in dict.fromkeys(job.whole_id for job in jobs):
            entry = self._session.ledger.find(job_id)
            if entry is not None and job_id in self._ids:
                state = worst([job for job in jobs if job.whole_id == job_id]).state.value
                self._session.ledger.update(entry, state=state)


def reported(job: JobInfo) -> tuple[JobState, tuple[str, ...], bool, bool]:
    """The state that is reported when it changes; other reasons to wait come and go."""
    return job.state, job.nodes, job.lacks_nodes, job.failed_to_launch


@dataclass(frozen=True, slots=True)
class ChangeNotes:
    """Tells the user how jobs change. ``note``: called with each line."""

    note: LineReporter

    def __call__(self, changed: Sequence[JobInfo], jobs: Sequence[JobInfo]) -> None:
        """Tell of the jobs that changed. ``jobs`` are all that are watched."""
        for whole_id in dict.fromkeys(job.whole_id for job in changed):
            tasks = [job for job in jobs if job.whole_id == whole_id]
            if len(tasks) > 1:
                self.note(f"job {whole_id}: {state_counts(tasks)}")
            own = [job for job in changed if job.whole_id == whole_id]
            for job in own:
                self._tell(job, array=len(tasks) > 1)
            if any(job.lacks_nodes for job in own):
                why = "`clusterctl status` says why"
                self.note(f"job {whole_id} waits for nodes that are out of service: {why}")

    def _tell(self, job: JobInfo, *, array: bool) -> None:
        """Tell of a job; of a task of an array only if it did not complete."""
        where = f" on {','.join(job.nodes)}" if job.nodes else ""
        why = f" ({job.reason})" if job.reason not in {"", "None"} else ""
        if not array or job.outcome in {Outcome.FAILED, Outcome.CANCELLED}:
            self.note(f"job {job.id} {job.state.value}{where}{why}")
        if job.failed_to_launch:
            self.note(f"job {job.id} is held, since a node could not start it; `clusterctl up` releases it")


def wait(
    session: Session,
    ids: Sequence[str],
    *,
    timeout_s: float | None = None,
    on_change: OnChange = lambda *_: None,
) -> tuple[JobInfo, ...]:
    """Wait until all jobs have ended; an array's id stands for all its tasks.

    Raises:
        WaitTimeoutError: ``timeout_s`` has passed; the jobs go on.
        SchedulerError: one of them is unknown, or the scheduler does not answer.
    """
    watched = _Watched(session, ids, on_change, timeout_s)
    for pause in backoff():
        jobs = watched.look()
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
    """Pass on what a job writes until it has ended, then return it: one JobInfo, or one a task of an array.

    After a broken connection it goes on where it stopped: no output is repeated or left out. ``rank``: see
    ``LogReader``.

    Raises:
        UnreachableError: the controller can't be reached for long. Else see ``wait``.
    """
    watched = _Watched(session, [job_id], on_change, timeout_s)
    clock, logs = session.scheduler.clock, JobLogs(session, job_id, rank)
    broken_since: float | None = None
    waits = backoff(first_s=0.5, longest_s=LONGEST_PAUSE_S)
    while True:
        looks, due = backoff(longest_s=LONGEST_PAUSE_S), clock.now()
        try:
            with closing(logs.grow(watched.seen, watched.deadline)) as chunks:
                for chunk in chunks:
                    broken_since, waits = None, backoff(first_s=0.5, longest_s=LONGEST_PAUSE_S)
                    if chunk is not None:
                        on_output(chunk)
                    if clock.now() >= due:
                        if (jobs := watched.look()) is not None:
                            for last in logs.new(jobs):
                                on_output(last)
                            return jobs
                        due = clock.now() + next(looks)
                    watched.check_deadline()
        except UnreachableError:
            broken_since = broken_since or clock.now()  # it may have been silent for long before
            if clock.now() >= broken_since + _RECONNECT_S:
                raise
            watched.pause(next(waits))


def diagnoses(session: Session, jobs: Sequence[JobInfo], *, waiting: bool = False) -> tuple[Diagnosis, ...]:
    """Why each of these jobs failed, then why each was cancelled; with ``waiting``, what each waits for."""
    states = (Outcome.FAILED, Outcome.CANCELLED)
    if not any(job.outcome in states or (waiting and job.state is JobState.PENDING) for job in jobs):
        return ()
    # Few jobs fail, and reading what is known of causes takes its time.
    from clusterctl.scheduler.evidence import diagnose_jobs  # noqa: PLC0415

    return diagnose_jobs(session, jobs, waiting=waiting)


def diagnosis_of(session: Session, jobs: Sequence[JobInfo]) -> Diagnosis | None:
    """Return why a job failed, or what it waits for, of an array why its worst task did.

    None: the job runs, or it completed.
    """
    return next(iter(diagnoses(session, jobs, waiting=True)), None)


def raise_unless_completed(session: Session, jobs: Sequence[JobInfo], *, log_is_shown: bool = False) -> None:
    """Turn the end of jobs into an error that names the cause, unless all of them completed.

    ``log_is_shown``: the job's log is on the screen already, so it is not quoted again.

    Raises:
        JobFailedError: one failed.
        JobCancelledError: none failed, and one was cancelled or ran into its time limit.
    """
    found = diagnoses(session, jobs)
    if not found:
        return
    head, more = found[0], len(found) - 1
    kind = JobCancelledError if worst(jobs).outcome is Outcome.CANCELLED else JobFailedError
    quoted = () if log_is_shown else (f"| {line}" for line in head.lines)
    error = kind(
        f"{head.summary} (and {more} more)" if more else head.summary,
        why="\n".join([head.details, *quoted]),
        fix=f"{head.fix}; the whole log: clusterctl logs {head.job_id}",
        failures=tuple(_failure(one, kind) for one in found),
    )
    error.answer = {"diagnosis": head.as_dict()}
    raise error


def _failure(one: Diagnosis, kind: type[ClusterctlError]) -> Failure:
    cause = "\n".join([f"{one.summary} ({one.details})", *one.lines])
    fix = f"{one.fix}; the whole log: clusterctl logs {one.job_id}"
    return Failure(kind.code, cause, host=one.host or None, fix=fix)


def cancel(session: Session, ids: Sequence[str]) -> tuple[JobInfo, ...]:
    """Cancel jobs; an array's id stands for all its tasks. Returns them as they were before.

    Raises:
        SchedulerError: one is not known (then none is cancelled), or refused. Else see ``known_jobs``.
    """
    jobs = known_jobs(session, ids)
    going_on = {one for job in jobs if not job.ended for one in (job.id, job.whole_id)}
    if going_on:
        session.scheduler.cancel([job_id for job_id in ids if job_id in going_on])
    return jobs


def known_jobs(session: Session, ids: Sequence[str]) -> tuple[JobInfo, ...]:
    """The jobs of these ids; an array's id stands for all its tasks.

    Raises:
        UsageError: an id is not one.
        SchedulerError: one of them is not known.
    """
    jobs = session.scheduler.jobs(ids)
    unknown = [i for i in ids if not any(i in (job.id, job.whole_id) for job in jobs)]
    if unknown:
        raise session.scheduler.unknown(unknown)
    return jobs


def list_jobs(session: Session, most: int | None = None) -> tuple[tuple[JobInfo, ...], int]:
    """The job user's jobs that go on or lately ended, and those submitted from here; newest first.

    ``most`` is how many there are at most, besides those that go on: an array is one. The number that is
    returned too is how many older ones are left out. What Slurm refused is no job, though it has a record.
    """
    resolve_submissions(session.scheduler, session.ledger)
    entries = session.ledger.entries()
    refused = {entry.token for entry in entries if entry.refused}
    found = tuple(job for job in session.scheduler.own_jobs() if job.token not in refused)
    known = {job.whole_id for job in found}
    others = [entry.job_id for entry in entries if entry.job_id is not None and entry.job_id not in known]
    asked = others[-most:] if most else others
    found = tuple(sorted(found + session.scheduler.jobs(asked), key=lambda job: (-job.number, job.task or 0)))
    ids = list(dict.fromkeys(job.whole_id for job in found))
    recent = {*ids[:most]}
    shown = tuple(job for job in found if job.whole_id in recent or not job.ended)
    older = len(ids) - len({job.whole_id for job in shown}) + len(others) - len(asked)
    return shown, older


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of one of a job's logs, as the job wrote them; ``task`` is set for an array.

    Of a rank's log, which has what it wrote to both, ``rank`` is set and ``stream`` is stdout.
    """

    stream: Literal["stdout", "stderr"]
    task: int | None
    data: bytes
    rank: int | None = None


OnOutput = Callable[[LogChunk], None]


@dataclass(slots=True)
class LogReader:
    """Reads the logs in a job's folder from where it last stopped."""

    transport: Transport
    folder: str
    task: int | None = None
    rank: str = ""  # one, or "all": the logs of ranks, in place of those of the whole job
    gone: bool = False  # the folder was not there when it was last looked at
    _offsets: dict[str, int] = field(default_factory=dict)

    def read(self, how: Literal["once", "follow"]) -> Generator[LogChunk | None, None, None]:
        """What was added since: once, or without end.

        None comes about once a second, so that the caller can look at the job.

        Raises:
            TransportError: the connection broke; calling it again goes on from there.
        """
        task = "" if self.task is None else str(self.task)
        argv = remote_argv(_PROGRAM, self.folder, how, json.dumps(self._offsets), task, self.rank)
        with closing(self.transport.stream(argv)) as stream:
            for line in lines(stream, self._not_understood(b"a line does not end")):
                yield self._chunk(line)

    def _chunk(self, line: bytes) -> LogChunk | None:
        try:
            answer = json.loads(line)
            self.gone = "gone" in answer
            if not answer or self.gone:
                return None
            match = _LOG.fullmatch(answer["log"])
            data = base64.b64decode(answer["data"])
            self._offsets[answer["log"]] = int(answer["at"]) + len(data)
        except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as exc:
            raise self._not_understood(line) from exc
        if match is None:
            return None
        task = match[2] or match[3]
        stream: Literal["stdout", "stderr"] = "stderr" if match[1] == "stderr" else "stdout"
        return LogChunk(stream, int(task) if task else None, data, int(match[4]) if match[4] else None)

    def _not_understood(self, line: bytes) -> TransportError:
        return TransportError(
            "the log reader on the cluster answered what clusterctl does not understand",
            code="answer-garbled",
            where=self.transport.host,
            why=line[:200].decode(errors="replace").encode("unicode_escape").decode(),
            host=self.transport.host,
        )


class JobLogs:
    """The logs of a job on the hosts that have them, from where they were last read."""

    def __init__(self, session: Session, job_id: str, rank: str = "") -> None:
        session.scheduler.check_id(job_id)
        self._session = session
        self.task = int(job_id.partition("_")[2]) if "_" in job_id else None
        self.folder = folder_of(session, job_id)
        self._rank = rank
        self._readers: dict[str, LogReader] = {}

    @property
    def gone(self) -> bool:
        return all(reader.gone for reader in self._readers.values())

    def new(self, jobs: Iterable[JobInfo]) -> Iterator[LogChunk]:
        """What was added since; ``jobs`` tell the nodes, which is needed where those have the logs."""
        for reader in self._readers_of(jobs):
            yield from (chunk for chunk in reader.read("once") if chunk is not None)

    def grow(
        self, seen: Mapping[str, JobInfo], deadline: float | None
    ) -> Generator[LogChunk | None, None, None]:
        """What is added, without end; None now and then. See ``LogReader.read``. ``seen`` may grow, too."""
        if not self._session.unshared_nodes:
            (reader,) = self._readers_of(())
            yield from reader.read("follow")  # which ends by an error, or by being closed
        clock = self._session.scheduler.clock
        for pause in backoff(longest_s=LONGEST_PAUSE_S):
            yield from self.new(seen.values())
            yield None
            clock.sleep(pause if deadline is None else max(0.0, min(pause, deadline - clock.now())))

    def _readers_of(self, jobs: Iterable[JobInfo]) -> list[LogReader]:
        nodes = tuple(dict.fromkeys(node for job in jobs for node in job.nodes))
        return [
            self._readers.setdefault(host, LogReader(transport, self.folder, self.task, self._rank))
            for host, transport in self._session.hosts_with_files(nodes)
        ]


def logs(session: Session, job_id: str, *, on_output: OnOutput, rank: str = "") -> None:
    """Pass on the output of a job so far, or what one of its ranks wrote, or all of them; see ``LogReader``.

    Raises:
        SchedulerError: see ``folder_of``; or its folder is gone.
    """
    found = JobLogs(session, job_id, rank)
    chunk = None
    for chunk in found.new(session.scheduler.jobs([job_id]) if session.unshared_nodes else ()):
        on_output(chunk)
    if found.gone:
        raise SchedulerError(
            f"the folder of job {job_id} is gone, and its logs with it",
            code="job-folder-gone",
            where=f"{found.folder} on the cluster",
            why="the job itself or a user removed it",
            fix="`clusterctl jobs` still says how it ended",
        )
    if chunk is None and rank not in ("", "all", "0"):
        raise UsageError(
            f"nothing is recorded of rank {rank} of job {job_id}",
            code="unknown-rank",
            why="it has no such rank, has not begun, or is a shell script, which starts its ranks itself",
            fix=f"`clusterctl logs {job_id} --label` shows the ranks there are",
        )
    if chunk is None and found.task is not None and not session.scheduler.jobs([job_id]):
        raise session.scheduler.unknown([job_id])


def folder_of(session: Session, job_id: str) -> str:
    """The job's folder on the cluster.

    Raises:
        SchedulerError: the job is unknown, or clusterctl did not submit it.
    """
    entry = session.ledger.find(job_id)
    if entry is not None and entry.remote_dir is not None:
        return entry.remote_dir
    jobs = session.scheduler.jobs([job_id])
    if not jobs:
        raise session.scheduler.unknown([job_id])
    if not jobs[0].token:
        raise unmanaged_job(jobs[0])
    return jobs[0].work_dir
