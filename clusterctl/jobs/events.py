"""Read the histories of jobs (see ``clusterctl.scheduler.history``) in their folders on the
cluster.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from clusterctl.scheduler.base import AccountingAwayError, JobInfo, JobState
from clusterctl.scheduler.history import Alarm, Attempt, Hang, attempts_of
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.records import (
    may_lack_128,
    restarts_of,
    with_accounted,
    with_all_attempts,
    with_recorded_exit,
)
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.process import call_on_hosts

# An array may have thousands of tasks.
_MOST_READ: Final = 64  # jobs
# So many queries of Slurm are saved up for changes that follow each other, as in a short job.
_MOST_SAVED: Final = 5
# If a node died, its jobs may be FAILED with this reason until the controller's watcher requeues
# them.
_KILLED: Final = "RaisedSignal:9("
_KILLED_S: Final = 15.0
# A job that has run for a shorter time was not examined for a hang.
_SOONEST_S: Final = 5


def restarts_of_job(session: Session, job: JobInfo) -> tuple[Attempt, ...]:
    """Return the attempts after which a job was restarted, as far as its folder on the cluster has
    a record of them.
    """
    return restarts_of(_histories(session, [job]).get(job.id, ()), job.attempts)


def with_hangs(session: Session, jobs: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
    """Return the jobs. Those that are running without progress have their ``hang``, those that waste
    time their ``alarms``.
    """
    histories = _histories(session, [job for job in jobs if _may_hang(job)])
    return tuple(_with_hang(job, histories.get(job.id, ())) for job in jobs)


def with_attempts(session: Session, jobs: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
    """Return the jobs, with the ``hang`` of those that hang, all attempts of those that were
    restarted, and the whole exit code of those that failed.

    Asks the accounting once, and only for restarted jobs that the queue still has.
    """
    restarted = {job.id: job for job in jobs if job.restarts or len(job.attempts) > 1}
    queued = dict.fromkeys(job.whole_id for job in restarted.values() if not job.attempts)
    # The jobs' own records also have their attempts.
    with suppress(AccountingAwayError):
        accounted = session.scheduler.accounted([*queued]) if queued else ()
        restarted = {job_id: with_accounted(job, accounted) for job_id, job in restarted.items()}
    read = [job for job in jobs if job.id in restarted or _may_hang(job)]
    # Only so many jobs are read: those of which more is to be learned come first.
    failed = [job for job in jobs if job.id not in restarted and may_lack_128(job)]
    histories = _histories(session, [*read, *failed])
    shown = []
    for job in jobs:
        own = histories.get(job.id, ())
        is_restarted = job.id in restarted
        shown_job = with_all_attempts(restarted.get(job.id, job), own if is_restarted else ())
        shown_job = with_recorded_exit(shown_job, own)
        shown.append(_with_hang(shown_job, own if _may_hang(job) else ()))
    return tuple(shown)


def requeue_grace_s(job: JobInfo) -> float:
    """Return for how many more seconds the controller's watcher may requeue a job that was killed;
    0 for other jobs.
    """
    if not job.reason.startswith(_KILLED):
        return 0.0
    # Slurm's times are Unix times.
    age_s = 0.0 if job.end_time is None else max(0.0, time.time() - job.end_time)
    return max(0.0, _KILLED_S - age_s)


def _may_hang(job: JobInfo) -> bool:
    start = job.last_start
    return job.state is JobState.RUNNING and start is not None and time.time() - start >= _SOONEST_S


def _with_hang(job: JobInfo, history: Sequence[Attempt]) -> JobInfo:
    last = history[-1] if history else Attempt()
    return replace(job, hang=hang_of(last), alarms=lasting_alarms(last))


def lasting_alarms(attempt: Attempt) -> tuple[Alarm, ...]:
    """Return the alarms that last until now, by the last attempt of a running job."""
    return tuple(each._replace(until=max(each.until, time.time())) for each in attempt.alarms)


def hang_of(attempt: Attempt) -> Hang | None:
    """Return the hang that lasts until now, by the last attempt of a running job. None: it does not
    hang.
    """
    hang = attempt.hang
    return hang and hang._replace(until=max(hang.until, time.time()))


class QueryTimer:
    """Decides when to ask Slurm about jobs: by the session's pace, and by new events in the jobs'
    folders.

    A query is due at most once in ``pace.changed_s`` on average. Unused queries are saved, up to a
    number.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked_at = -math.inf
        self._saved = 0.0
        self._histories: Mapping[str, Sequence[Attempt]] = {}

    def is_due(self, jobs: Iterable[JobInfo]) -> bool:
        """Return whether to ask Slurm now. jobs: the answer to the last query."""
        now = self._session.scheduler.clock.now()
        waited = now - self._asked_at
        pace_s = self._session.site.pace.changed_s
        active = [job for job in jobs if not job.ended]
        saved = min(_MOST_SAVED, self._saved + waited / pace_s) if pace_s else _MOST_SAVED
        # The fewer are left, the longer are the pauses, in seconds.
        may_ask = saved >= 1 and waited >= _MOST_SAVED - saved
        is_due = may_ask and (waited >= self._longest_s(active) or self._has_news(active))
        if is_due:
            self._asked_at = now
            self._saved = saved - 1
        return is_due

    def _longest_s(self, active: Sequence[JobInfo]) -> float:
        pace = self._session.site.pace
        pauses = {JobState.PENDING: pace.pending_s, JobState.RUNNING: pace.running_s}
        longest_s = min(
            (pauses.get(job.state, pace.changed_s) for job in active), default=pace.changed_s
        )
        # The events of the other jobs are not read.
        return longest_s if len(active) <= _MOST_READ else min(longest_s, pace.pending_s)

    def _has_news(self, active: Sequence[JobInfo]) -> bool:
        """Return whether jobs have recorded new events, or running jobs have recorded their end."""
        previous = self._histories
        self._histories = _histories(self._session, active)
        running = (
            self._histories.get(job.id, ()) for job in active if job.state is not JobState.PENDING
        )
        if any(history and history[-1].has_ended for history in running):
            return True
        return any(
            history != previous.get(job_id, (Attempt(),))
            for job_id, history in self._histories.items()
        )


def _histories(session: Session, jobs: Sequence[JobInfo]) -> Mapping[str, Sequence[Attempt]]:
    """Return the attempts of each job that clusterctl submitted, if its folder can be read."""
    hosts: dict[str, Transport] = {}
    folders: dict[str, dict[str, str]] = {}
    for job in [job for job in jobs if job.token][:_MOST_READ]:
        host, hosts[host] = session.hosts_with_files(job.nodes)[0]
        task = "" if job.task is None else f"/task-{job.task}"
        folders.setdefault(host, {})[job.id] = f"{job.work_dir}{task}"

    def read(host: str) -> list[str]:
        argv = remote_argv(
            "clusterctl.scheduler.ends.remote_logs", "events", *folders[host].values()
        )
        with suppress(ValueError):
            answer = json.loads(hosts[host].run(argv, check=False).stdout)
            return list(map(str, answer))
        return []

    answers, _ = call_on_hosts(hosts, read)
    return {
        job_id: attempts_of(text)
        for host, texts in answers.items()
        for job_id, text in zip(folders[host], texts, strict=False)
    }
