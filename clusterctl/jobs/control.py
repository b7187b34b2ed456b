"""List and cancel jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.scheduler.models import JobInfo
from clusterctl.scheduler.session import Session, resolve_submissions


@dataclass(frozen=True, slots=True)
class Cancelled:
    """``cancelled`` were told to end; ``ended`` had already done so."""

    cancelled: tuple[JobInfo, ...]
    ended: tuple[JobInfo, ...]


def cancel(session: Session, ids: Sequence[str]) -> Cancelled:
    """Cancel jobs; an array's id stands for all its tasks.

    Raises:
        UsageError: an id is not one.
        SchedulerError: one of them is not known (then none is cancelled), or refused.
    """
    jobs = known_jobs(session, ids)
    going_on = tuple(job for job in jobs if not job.ended)
    if going_on:
        wanted = {job.id for job in going_on} | {job.whole_id for job in going_on}
        session.scheduler.cancel([job_id for job_id in ids if job_id in wanted])
    return Cancelled(going_on, tuple(job for job in jobs if job.ended))


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


def list_jobs(session: Session) -> tuple[JobInfo, ...]:
    """The job user's jobs that go on or lately ended, and those submitted from here; oldest first.

    Raises:
        SchedulerError: it can't be told.
    """
    resolve_submissions(session.scheduler, session.ledger)
    found = session.scheduler.own_jobs()
    known = {job.whole_id for job in found}
    entries = session.ledger.entries()
    others = [entry.job_id for entry in entries if entry.job_id is not None and entry.job_id not in known]
    found += session.scheduler.jobs(others)
    return tuple(sorted(found, key=lambda job: (job.job_id, job.task or 0)))
