"""The command wait, and functions that wait for jobs and show their output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from clusterctl.cli.messages import Notify, telling
from clusterctl.cli.options import JobIds, option
from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.errors import Notice, UsageError, WaitTimeoutError
from clusterctl.jobs import watch
from clusterctl.jobs.messages import TELLS_NOBODY, JobMessages, chosen_receivers
from clusterctl.jobs.queue import known_jobs
from clusterctl.jobs.watch import ChangeNotes, OnOutput
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.ends.diagnosis import Diagnosis, notices_of
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.session import Session, open_session
from clusterctl.spec.units import parse_slurm_time_s
from clusterctl.state.run_names import cluster_of_jobs, job_id_of

Timeout = Annotated[
    str | None, option("Stop waiting after this time, such as 10m; the job is not cancelled.")
]


@dataclass(frozen=True, slots=True)
class WaitResult:
    """What waiting for jobs has shown.

    jobs: all jobs, or tasks of arrays, as they were last seen. found: their diagnoses, by their IDs.
        timeout: the error if the wait timed out.
    """

    ids: tuple[str, ...]
    jobs: tuple[JobInfo, ...]
    found: Mapping[str, Diagnosis] = field(default_factory=dict)
    timeout: WaitTimeoutError | None = None

    def raise_errors(self) -> None:
        """Raise an error unless all jobs have completed. Its exit code tells how they ended."""
        if self.timeout is not None:
            raise self.timeout
        watch.raise_failures(self.jobs, self.found)

    def tasks_of(self, job_id: str) -> list[JobInfo]:
        return [job for job in self.jobs if job_id in (job.id, job.whole_id)]

    def ends(self) -> Iterator[Ending]:
        """Yield how each job ended, or its present state."""
        for job_id in self.ids:
            tasks = self.tasks_of(job_id)
            diagnosis = watch.first_of(tasks, self.found)
            yield Ending.of(tasks, diagnosis, job_id=job_id) if tasks else Ending(job_id=job_id)


def wait(screen: Screen, ids: JobIds, timeout: Timeout = None, notify: Notify = None) -> None:
    """Wait until jobs have ended. Ctrl-C detaches; the jobs keep running.

    The exit code is that of `submit --wait`: 4 if a job failed or can never start, 5 if it was
    cancelled or reached its time limit, 6 if the wait timed out.
    """
    timeout_s = timeout_of(timeout)
    receivers = chosen_receivers(notify or ())
    with open_session(cluster_of_jobs(ids, screen.chosen())) as session:
        ids = [job_id_of(name, session.ledger) for name in ids]
        ids = [*dict.fromkeys(session.packed_job(job_id) or job_id for job_id in ids)]
        # Slurm may not know a job yet that was just submitted from here.
        if others := [job_id for job_id in ids if session.ledger.find(job_id) is None]:
            known_jobs(session, others)
        with telling(screen, receivers) as told:
            waited = wait_for(screen, session, ids, timeout_s, told)
    ends = [*waited.ends()]
    screen.partial_answer = {"jobs": [end.as_dict() for end in ends]}
    waited.raise_errors()
    screen.result(screen.partial_answer, *(end.line for end in ends))


def wait_for(
    screen: Screen,
    session: Session,
    ids: list[str],
    timeout_s: float | None,
    telling: JobMessages = TELLS_NOBODY,
) -> WaitResult:
    """Wait until jobs have ended or the time is over. ``telling`` sends messages about them."""
    changes = ChangeNotes(session, screen.note, telling, end_is_shown=True)
    try:
        with (
            screen.working(f"waiting for job {', '.join(ids)}"),
            _detaching(screen, ids),
        ):
            ended = watch.wait(session, ids, timeout_s=timeout_s, on_change=changes)
    except WaitTimeoutError as exc:
        return WaitResult(tuple(ids), exc.jobs, timeout=exc)
    telling.look(session, ended)
    found = watch.judge(session, ended)
    screen.note(*notices_of(found.values()))
    return WaitResult(tuple(ids), ended, found)


def follow_job(
    screen: Screen,
    session: Session,
    job_id: str,
    timeout_s: float | None,
    *,
    show: OnOutput,
    rank: str = "",
    telling: JobMessages = TELLS_NOBODY,
) -> tuple[JobInfo, ...]:
    """Show the output of a job until it has ended. Return the job, or all tasks of a job array.

    show: called with each part of the output. rank: a rank's number, or "all" ranks; default: the
    job's log. telling: sends messages about the job. Raise JobFailedError or JobCancelledError if the
    job failed or was cancelled.
    """
    # The log of a rank has no alarms.
    changes = ChangeNotes(session, screen.note, telling, log_is_shown=not rank)
    with _detaching(screen, [job_id]):
        ended = watch.follow(
            session, job_id, on_output=show, rank=rank, timeout_s=timeout_s, on_change=changes
        )
    telling.look(session, ended)
    screen.note(*watch.raise_unless_completed(session, ended, log_is_shown=True))
    return ended


@contextmanager
def _detaching(screen: Screen, ids: Sequence[str]) -> Iterator[None]:
    """If Ctrl-C or a signal ends the ``with`` block, tell the user that the jobs keep running."""
    try:
        yield
    except ENDINGS:
        job = f"job {', '.join(ids)} is not cancelled"
        text = f"detached; {job}; follow it with `clusterctl logs {ids[0]} -f`"
        screen.note(Notice("detached", text))
        raise


def timeout_of(text: str | None, flag: str = "--timeout") -> float | None:
    """Return the value of a flag that is a time, such as 30m or 1:30:00, in seconds."""
    try:
        return None if text is None else float(parse_slurm_time_s(text))
    except ValueError as exc:
        fix = f"write it as {flag} 30m, or leave it out"
        raise UsageError(f"{flag}: {exc}", about="value", fix=fix) from exc
