"""What the scheduler knows of the jobs of a `collect`: asked once, for all jobs together.

A query of the accounting may take half a minute, so those that don't need each other's answers run
at the same time, and while the first files are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from clusterctl.errors import SchedulerError, printable
from clusterctl.scheduler.base import AccountingAwayError, JobInfo, Jobs
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.accounting import shows_running_job
from clusterctl.util.process import start_in_thread

if TYPE_CHECKING:
    from clusterctl.scheduler.ends.judge import SlurmFacts

_ACCOUNTING_LAG_S = 10.0
_ACCOUNTING_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class KnownToSlurm:
    """What Slurm knows of jobs beside their states.

    accounting: sacct's records as JSON, by the jobs' IDs. missing: why a record is missing, or "".
    is_accounting_away: whether that is because the accounting does not answer.
    """

    version: str | None
    facts: SlurmFacts
    accounting: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    is_accounting_away: bool = False


@dataclass(frozen=True, slots=True)
class AskedJobs:
    """The jobs that Slurm was asked for.

    jobs: by their IDs, each with its tasks. missing: why one may be missing although Slurm has it;
        "" if Slurm has told all.
    known: waits for the rest of what Slurm knows.
    """

    jobs: Mapping[str, Sequence[JobInfo]]
    missing: str
    known: Callable[[], KnownToSlurm]

    @classmethod
    def ask(cls, session: Session, ids: Sequence[str]) -> AskedJobs:
        """Ask Slurm about jobs.

        Raises SchedulerError: the scheduler does not answer, or rejects the request.
        """
        version = start_in_thread(session.scheduler.version)
        records = start_in_thread(partial(session.scheduler.accounting, ids))
        missing = ""
        try:
            found = session.scheduler.jobs_in_full(ids)
        except AccountingAwayError as exc:
            found = exc.queued
            missing = exc.what
        known = start_in_thread(partial(_wait_for_rest, session, found, version, records))
        jobs: dict[str, list[JobInfo]] = {}
        for job in found:
            jobs.setdefault(job.whole_id, []).append(job)
        return cls(jobs, missing, _kept(known))


def _kept(known: Callable[[], KnownToSlurm]) -> Callable[[], KnownToSlurm]:
    """Return a function that waits for a result and then always returns it."""
    results: list[KnownToSlurm] = []

    def wait() -> KnownToSlurm:
        results.extend([] if results else [known()])
        return results[0]

    return wait


def _wait_for_rest(
    session: Session,
    jobs: Sequence[JobInfo],
    version: Callable[[], str | None],
    records: Callable[[], Mapping[str, str] | None],
) -> KnownToSlurm:
    # This import is slow.
    from clusterctl.scheduler.ends.judge import SlurmFacts  # noqa: PLC0415

    known = KnownToSlurm(version(), SlurmFacts.of(session, jobs))
    try:
        texts = _with_ends(session.scheduler, jobs, records() or {})
    except AccountingAwayError as exc:
        return replace(known, missing=printable(exc.what), is_accounting_away=True)
    except SchedulerError as exc:
        if exc.retryable:
            raise
        return replace(known, missing=printable(exc.cause))
    return replace(known, accounting=texts)


def _with_ends(
    scheduler: Jobs, jobs: Sequence[JobInfo], texts: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the records of jobs. Wait a limited time until they show the ends of those that have
    ended.
    """
    going_on = {job.whole_id for job in jobs if not job.ended}
    for _ in scheduler.clock.polls(
        _ACCOUNTING_LAG_S, first_s=_ACCOUNTING_PAUSE_S, longest_s=_ACCOUNTING_PAUSE_S
    ):
        behind = [
            job_id
            for job_id, text in texts.items()
            if job_id not in going_on and shows_running_job(text)
        ]
        if not behind:
            break
        texts = {**texts, **(scheduler.accounting(behind) or {})}
    return texts
