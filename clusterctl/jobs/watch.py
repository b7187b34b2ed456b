"""Wait for jobs, follow one, and report how they ended. One query for all, ever less often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from clusterctl.errors import (
    ClusterctlError,
    Failure,
    JobCancelledError,
    JobFailedError,
    SchedulerError,
    TransportError,
    UnreachableError,
    WaitTimeoutError,
)
from clusterctl.jobs.logs import LogReader, NodeLocalLogs, OnOutput, drain, folder_of, tail, task_of
from clusterctl.scheduler.base import backoff
from clusterctl.scheduler.models import JobInfo, JobState, Outcome, worst
from clusterctl.scheduler.session import Session

OnChange = Callable[[JobInfo], None]

_APPEAR_S = 30.0  # how long a job may be unknown: sbatch has answered, the accounting has not heard of it yet
_FOLLOW_LONGEST_S = 5.0
_RECONNECT_S = 60.0


class _Watched:
    """The jobs that are waited for, in the state last seen."""

    def __init__(self, session: Session, ids: Sequence[str], on_change: OnChange) -> None:
        self._session = session
        self._ids = tuple(ids)
        self._on_change = on_change
        self._seen: dict[str, JobInfo] = {}
        self._unknown_until = session.scheduler.clock.now() + _APPEAR_S

    def look(self) -> tuple[JobInfo, ...] | None:
        """Ask Slurm; the jobs if all have ended, else None. Tells ``on_change`` what is new."""
        jobs = self._session.scheduler.jobs(self._ids)
        for job in jobs:
            before = self._seen.get(job.id)
            if before is None or _reported(before) != _reported(job):
                self._on_change(job)
            self._seen[job.id] = job
        missing = [i for i in self._ids if not any(i in (job.id, job.whole_id) for job in jobs)]
        if missing:
            if self._session.scheduler.clock.now() > self._unknown_until:
                raise self._session.scheduler.unknown(missing)
            return None
        if not all(job.ended for job in jobs):
            return None
        self._remember(jobs)
        return jobs

    @property
    def seen(self) -> tuple[JobInfo, ...]:
        """The jobs as they were last seen."""
        return tuple(self._seen.values())

    def ran_out(self, timeout_s: float | None) -> WaitTimeoutError:
        """The error for a wait that was too long; says where the jobs stand."""
        what = f"job {self._ids[0]} has" if len(self._ids) == 1 else f"jobs {', '.join(self._ids)} have"
        stand = (f"{j.id} is {j.state.value} ({j.reason or 'no reason given'})" for j in self._seen.values())
        return WaitTimeoutError(
            f"{what} not ended within {timeout_s:g} s",
            why="; ".join(stand),
            fix=f"it goes on; `clusterctl logs {self._ids[0]} -f` follows it, `clusterctl cancel` ends it",
        )

    def _remember(self, jobs: Sequence[JobInfo]) -> None:
        for job_id in dict.fromkeys(job.whole_id for job in jobs):
            entry = self._session.ledger.find(job_id)
            if entry is not None and job_id in self._ids:
                state = worst([job for job in jobs if job.whole_id == job_id]).state.value
                self._session.ledger.update(entry, state=state)


def _reported(job: JobInfo) -> tuple[JobState, tuple[str, ...], bool, bool]:
    """The state that is reported when it changes; other reasons to wait come and go."""
    return job.state, job.nodes, job.lacks_nodes, job.failed_to_launch


def wait(
    session: Session,
    ids: Sequence[str],
    *,
    timeout_s: float | None = None,
    on_change: OnChange = lambda _job: None,
) -> tuple[JobInfo, ...]:
    """Wait until all jobs have ended; an array's id stands for all its tasks.

    Raises:
        WaitTimeoutError: ``timeout_s`` has passed; the jobs go on.
        SchedulerError: one of them is unknown, or the scheduler does not answer.
    """
    clock = session.scheduler.clock
    deadline = None if timeout_s is None else clock.now() + timeout_s
    watched = _Watched(session, ids, on_change)
    for pause in backoff():
        jobs = watched.look()
        if jobs is not None:
            return jobs
        left = pause if deadline is None else min(pause, deadline - clock.now())
        if left <= 0:
            raise watched.ran_out(timeout_s)
        clock.sleep(left)
    raise AssertionError("backoff never ends")


def follow(
    session: Session,
    job_id: str,
    *,
    on_output: OnOutput,
    timeout_s: float | None = None,
    on_change: OnChange = lambda _job: None,
) -> tuple[JobInfo, ...]:
    """Pass on what a job writes until it has ended, then return it: one JobInfo, or one a task of an array.

    After a broken connection it goes on where it stopped: no output is repeated or left out.

    Raises:
        WaitTimeoutError: ``timeout_s`` has passed; the job goes on.
        SchedulerError: the job is unknown, or the scheduler does not answer.
        UnreachableError: the controller can't be reached for long.
    """
    watched = _Watched(session, [job_id], on_change)
    how = _follow_node_local if session.node_local else _follow_stream
    return how(session, job_id, watched, on_output, timeout_s)


def _follow_stream(
    session: Session, job_id: str, watched: _Watched, on_output: OnOutput, timeout_s: float | None
) -> tuple[JobInfo, ...]:
    """Where the controller sees the logs, it passes on what they grow by."""
    clock = session.scheduler.clock
    deadline = None if timeout_s is None else clock.now() + timeout_s
    reader = LogReader(session.transport, folder_of(session, job_id), task_of(session, job_id))
    pauses = backoff(longest_s=_FOLLOW_LONGEST_S)
    due = clock.now()
    waits = backoff(first_s=0.5, longest_s=_FOLLOW_LONGEST_S)
    give_up: float | None = None  # while the connection is broken
    while True:
        try:
            with closing(reader.grow()) as chunks:
                for chunk in chunks:
                    give_up, waits = None, backoff(first_s=0.5, longest_s=_FOLLOW_LONGEST_S)
                    if chunk is not None:
                        on_output(chunk)
                    if clock.now() >= due:
                        if (jobs := watched.look()) is not None:
                            drain(reader, on_output)
                            return jobs
                        due = clock.now() + next(pauses)
                    if deadline is not None and clock.now() >= deadline:
                        raise watched.ran_out(timeout_s)
        except UnreachableError:
            give_up = give_up or clock.now() + _RECONNECT_S  # it may have been silent for long before
            if clock.now() >= give_up:
                raise
            left = next(waits) if deadline is None else min(next(waits), deadline - clock.now())
            if left <= 0:
                raise watched.ran_out(timeout_s) from None
            clock.sleep(left)


def _follow_node_local(
    session: Session, job_id: str, watched: _Watched, on_output: OnOutput, timeout_s: float | None
) -> tuple[JobInfo, ...]:
    """The same where hosts share no folder: which host writes the log is known once the job runs."""
    clock = session.scheduler.clock
    deadline = None if timeout_s is None else clock.now() + timeout_s
    node_local = NodeLocalLogs(session, folder_of(session, job_id), task_of(session, job_id))
    give_up: float | None = None  # while the connection is broken
    for pause in backoff(longest_s=_FOLLOW_LONGEST_S):
        try:
            ended = watched.look()
            for chunk in node_local.new(watched.seen):
                on_output(chunk)
            give_up = None
            if ended is not None:
                return ended
        except UnreachableError:
            give_up = give_up or clock.now() + _RECONNECT_S
            if clock.now() >= give_up:
                raise
        left = pause if deadline is None else min(pause, deadline - clock.now())
        if left <= 0:
            raise watched.ran_out(timeout_s)
        clock.sleep(left)
    raise AssertionError("backoff never ends")


def raise_unless_completed(session: Session, jobs: Sequence[JobInfo]) -> None:
    """Turn the end of jobs into an error, unless all of them completed.

    Raises:
        JobFailedError: one failed; says Slurm's state and reason, and the tail of its log.
        JobCancelledError: none failed, and one was cancelled or ran into its time limit.
    """
    bad = [job for job in jobs if job.outcome is not Outcome.COMPLETED]
    if not bad:
        return
    job = worst(bad)
    cancelled = job.outcome is Outcome.CANCELLED
    kind = JobCancelledError if cancelled else JobFailedError
    try:
        said = tail(session.holders(job.nodes)[0][1], folder_of(session, job.id), job.task)
        quoted = "\n".join(f"| {line}" for line in said.split("\n"))
        log = f"its log ends:\n{quoted}" if said else "it wrote nothing"
    except (SchedulerError, TransportError) as exc:  # how the job ended is what was asked for
        said, log = "", f"its log can't be read: {exc.what}"
    how = _how_it_ended(job)
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    raise kind(
        f"job {job.id} ({job.name}) ended {job.state.value}{more}",
        why=f"{how}; {log}",
        fix=_whole_log(job),
        failures=tuple(_failure(one, kind, said if one is job else "") for one in bad),
    )


def _how_it_ended(job: JobInfo) -> str:
    parts = [job.state.value if job.prefix else f"Slurm says {job.state.value}"]
    if job.reason and job.reason not in {"NonZeroExitCode", "JobLaunchFailure"}:
        parts.append(f"reason {job.reason}")
    if job.signal:
        parts.append(f"signal {job.signal}")
    elif job.exit_code:
        parts.append(f"exit code {job.exit_code}")
    if job.nodes:
        parts.append(f"on {', '.join(job.nodes)}")
    return ", ".join(parts)


def _whole_log(job: JobInfo) -> str:
    return f"the whole log: clusterctl logs {job.id}"


def _failure(job: JobInfo, kind: type[ClusterctlError], said: str) -> Failure:
    ended = f"job {job.id}: {_how_it_ended(job)}"
    cause = f"{ended}; its log ends:\n{said}" if said else ended
    return Failure(kind.code, cause, host=job.nodes[0] if len(job.nodes) == 1 else None, fix=_whole_log(job))
