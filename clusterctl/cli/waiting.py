"""Functions that wait for jobs and show their output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.errors import Notice, UsageError
from clusterctl.jobs import watch
from clusterctl.jobs.messages import TELLS_NOBODY, Telling
from clusterctl.jobs.watch import ChangeNotes, OnOutput
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.session import Session
from clusterctl.spec.units import parse_slurm_time_s


def wait_for(
    screen: Screen,
    session: Session,
    ids: list[str],
    timeout_s: float | None,
    telling: Telling = TELLS_NOBODY,
) -> tuple[JobInfo, ...]:
    """Wait until jobs have ended. ``telling`` sends messages about them."""
    changes = ChangeNotes(session, screen.note, telling)
    with screen.working(f"waiting for job {', '.join(ids)}"), _detaching(screen, ids):
        ended = watch.wait(session, ids, timeout_s=timeout_s, on_change=changes)
    telling.look(session, ended)
    return ended


def follow_job(
    screen: Screen,
    session: Session,
    job_id: str,
    timeout_s: float | None,
    *,
    show: OnOutput,
    rank: str = "",
    telling: Telling = TELLS_NOBODY,
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
    watch.raise_unless_completed(session, ended, log_is_shown=True)
    return ended


@contextmanager
def _detaching(screen: Screen, ids: Sequence[str]) -> Iterator[None]:
    """If Ctrl-C or a signal ends the ``with`` block, tell the user that the jobs keep running."""
    try:
        yield
    except ENDINGS:
        text = (
            f"detached; job {', '.join(ids)} keeps running; follow it with `clusterctl logs "
            f"{ids[0]} -f`"
        )
        screen.note(Notice("detached", text))
        raise


def timeout_of(text: str | None, flag: str = "--timeout") -> float | None:
    """Return the value of a flag that is a time, such as 30m or 1:30:00, in seconds."""
    try:
        return None if text is None else float(parse_slurm_time_s(text))
    except ValueError as exc:
        message = f"{flag} {text} is not a time"
        fix = f"write it as {flag} 30m"
        raise UsageError(message, code="bad-value", why=str(exc), fix=fix) from exc
