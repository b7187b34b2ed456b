"""The jobs in the queue and in the accounting: find, list and cancel jobs."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    Notice,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.jobs.events import requeue_grace_s, with_attempts
from clusterctl.scheduler.base import (
    AccountingAwayError,
    JobInfo,
    JobState,
    comment_of,
    has_final_run,
    unknown_or_task,
    unmanaged_job_error,
    worst_job,
)
from clusterctl.scheduler.request.arrays import has_task, names_tasks
from clusterctl.scheduler.request.job_secrets import remove_old_secrets
from clusterctl.scheduler.session import Session, resolve_submissions
from clusterctl.scheduler.slurm.records import recorded_jobs, remember_states
from clusterctl.spec.names import RUN_UP
from clusterctl.state.run_names import job_id_of
from clusterctl.util.numbers import counted

if TYPE_CHECKING:
    from clusterctl.state.run_record import RunRecord, TaskRecord


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Result of a cancellation.

    jobs: the known jobs, with their state before the cancellation. An array has an entry for each
        task.
    errors: job id -> error, for ids of unknown jobs and of jobs that could not be cancelled.
    ids: all ids that were given.
    """

    jobs: tuple[JobInfo, ...]
    errors: Mapping[str, ClusterctlError]
    ids: tuple[str, ...] = ()

    @property
    def to_cancel(self) -> list[str]:
        """The ids that select a job, or tasks of an array, that have not ended."""
        active = {own_id for job in self.jobs if not job.ended for own_id in (job.id, job.whole_id)}
        return [job_id for job_id in self.ids if job_id in active]

    def raise_errors(self) -> None:
        """Raise the error of the only job, or an error that joins those of several jobs."""
        failed = [*self.errors.values()]
        if len(failed) == 1:
            raise failed[0]
        if failed:
            raise SchedulerError(
                f"{counted(len(failed), 'job')} could not be cancelled",
                about="cancel",
                why="\n".join(error.cause for error in failed),
                fix="\n".join(dict.fromkeys(error.fix for error in failed if error.fix)),
                failures=tuple(failure for error in failed for failure in error.failures),
            )


@dataclass(frozen=True, slots=True)
class JobList:
    """A list of jobs, newest first.

    older: the number of older jobs that are left out.
    unlisted: the number of jobs that may have ended, but are left out because the accounting does
        not answer.
    repair: the remedy for a broken cluster.
    """

    jobs: tuple[JobInfo, ...]
    older: int = 0
    unlisted: int = 0
    repair: str = RUN_UP

    @property
    def unlisted_notice(self) -> Notice:
        return Notice(
            "unlisted-jobs",
            f"{counted(self.unlisted, 'job')} that left the queue can't be listed, because "
            f"Slurm's accounting (slurmdbd) does not answer: {self.repair}",
        )


def select(session: Session, ids: Sequence[str]) -> Cancellation:
    """Return the effect of ``cancel``: the errors of unknown jobs, and all jobs.

    Raises the errors of ``cancel``.
    """
    errors: dict[str, ClusterctlError]
    # The submission of this job may have got no answer.
    resolve_submissions(session.scheduler, session.ledger)
    ids = [job_id_of(name, session.ledger) for name in ids]
    _reject_wrong_tasks(ids)
    asked = [job_id.partition("_[")[0] for job_id in ids]
    try:
        jobs = session.scheduler.jobs(asked)
        ids = _with_single_tasks(ids, jobs)
        errors = {
            job_id: unknown_or_task(job_id, jobs, session.unknown([job_id]))
            for job_id in _missing(ids, jobs)
        }
    except AccountingAwayError as exc:
        jobs = exc.queued
        ids = _with_single_tasks(ids, jobs)
        errors = {job_id: exc.of_job(job_id) for job_id in _missing(ids, jobs)}
    # Not a task of which an id is Slurm's own number: its error tells how to name it.
    jobs = tuple(job for job in jobs if {job.id, job.whole_id}.intersection(ids))
    return Cancellation(jobs, errors, tuple(ids))


def _reject_wrong_tasks(ids: Iterable[str]) -> None:
    """Raise UsageError for words such as ``12_[3-1]``, which name no tasks."""
    for job_id in ids:
        array, bracket, tasks = job_id.partition("_[")
        if bracket and not names_tasks(tasks.removesuffix("]")):
            raise UsageError(
                f"{job_id} does not name tasks of job {array}",
                about="job-id",
                fix=f"name tasks as in {array}_[1-3,7], with the lower number first",
            )


def _with_single_tasks(ids: Sequence[str], jobs: Sequence[JobInfo]) -> list[str]:
    """Return ids with those of the tasks that words such as ``12_[1-3,7]`` select. A word that
    selects none of the jobs stays.
    """
    single: list[str] = []
    for job_id in ids:
        array, bracket, tasks = job_id.partition("_[")
        selected = [
            job.id
            for job in jobs
            if bracket
            and job.whole_id == array
            and has_task(tasks, -1 if job.task is None else job.task)
        ]
        single += selected or [job_id]
    return list(dict.fromkeys(single))


def cancel(session: Session, ids: Sequence[str]) -> Cancellation:
    """Cancel all jobs that can be cancelled. An array's id selects all its tasks, and ``12_[1-3,7]``
    the tasks of array 12 with these numbers, as far as there are such tasks.

    Raises:
        UsageError: an id is malformed. Then no job is cancelled.
        SchedulerError: the scheduler does not answer.
    """
    selected = select(session, ids)
    jobs = selected.jobs
    errors = dict(selected.errors)
    if selected.to_cancel:
        refused = session.scheduler.cancel(selected.to_cancel)
        errors |= {job_id: _with_fix(session, jobs, job_id, refused[job_id]) for job_id in refused}
        remove_old_secrets(session)
    return replace(selected, errors=errors)


def _with_fix(
    session: Session, jobs: Sequence[JobInfo], job_id: str, error: ClusterctlError
) -> ClusterctlError:
    """Return the error about a job that can't be cancelled, with the fix for another user's job."""
    job = next(job for job in jobs if job_id in (job.id, job.whole_id))
    if job.user == session.inventory.job_user:
        return error
    return SchedulerError(
        f"job {job_id} of user {job.user} can't be cancelled",
        code=error.code,
        about=error.about,
        why=error.why,
        fix=f"ask {job.user}" + session.site.advice.cancels_of_others.format(ids=job_id),
    )


def packed_task(session: Session, job_id: str) -> tuple[JobInfo, ...]:
    """Return the task with this ID that runs inside a job (`submit --pack`); () if there is none."""
    job_id = job_id_of(job_id, session.ledger)
    whole = session.packed_job(job_id)
    if not whole:
        return ()
    # This import is slow.
    from clusterctl.scheduler.ends.judge import tasks_inside  # noqa: PLC0415

    return tuple(
        task
        for job in collected_jobs(session, whole) or session.scheduler.jobs([whole])
        for task in tasks_inside(session, job)
        if task.id == job_id
    )


def _missing(ids: Sequence[str], jobs: Sequence[JobInfo]) -> list[str]:
    job_ids = {job_id for job in jobs for job_id in (job.id, job.whole_id)}
    return [job_id for job_id in ids if job_id not in job_ids]


def known_jobs(session: Session, ids: Sequence[str]) -> tuple[JobInfo, ...]:
    """Return the jobs with these ids. An array's id selects all its tasks.

    Raises:
        UsageError: an id is malformed.
        SchedulerError: a job is unknown.
    """
    ids = [job_id_of(name, session.ledger) for name in ids]
    try:
        jobs = session.scheduler.jobs(ids)
    except AccountingAwayError as exc:
        jobs = exc.queued
        if missing := _missing(ids, jobs):
            raise exc.of_job(missing[0]) from exc
        return jobs
    if unknown := _missing(ids, jobs):
        raise unknown_or_task(unknown[0], jobs, session.unknown(unknown))
    _remember(session, jobs, ids)
    return jobs


def _remember(session: Session, jobs: Sequence[JobInfo], asked: Collection[str]) -> None:
    """Record the final states of jobs, because Slurm's queue, without accounting, soon forgets
    them.

    asked: the ids of which all tasks are among the jobs. Tasks do not tell how their array ends.
    """
    may_go_on = {job.whole_id for job in jobs if requeue_grace_s(job)}
    whole = {*asked} - may_go_on
    remember_states(session.ledger, [job for job in jobs if job.whole_id in whole])


def collected_jobs(session: Session, job_id: str) -> tuple[JobInfo, ...]:
    """Return an ended job, or the tasks of an array, by the record of its run on this machine; () if
    it has none. Slurm is not asked.
    """
    entry = session.ledger.find(job_id)
    if entry is None or not has_final_run(entry):
        return ()
    # This import is slow.
    from clusterctl.state.run_record import RunRecord  # noqa: PLC0415

    # A person may have changed the record.
    with suppress(CollectError, ValueError):
        run = RunRecord.load(Path(entry.run_dir or ""))
        if run.final and run.token == entry.token and run.job_id == entry.job_id:
            jobs = tuple(_job_of(run, task) for task in run.tasks)
            return tuple(job for job in jobs if job_id in (job.id, job.whole_id))
    return ()


def _job_of(run: RunRecord, task: TaskRecord) -> JobInfo:
    number = run.job_id.lstrip(string.ascii_letters)
    return JobInfo(
        number=int(number),
        prefix=run.job_id.removesuffix(number),
        task=int(task.number) if task.number else None,
        name=run.name,
        user=run.user,
        partition=run.partition,
        account=run.account,
        qos=run.qos,
        state=JobState(task.state),
        reason=task.reason,
        exit_code=task.exit_code,
        signal=task.signal,
        nodes=task.nodes,
        submit_time=run.submit_time,
        start_time=task.start_time,
        end_time=task.end_time,
        time_limit_s=task.time_limit_s,
        tres=task.tres,
        work_dir=run.remote_dir,
        comment=comment_of(run.token),
        restarts=max(0, len(task.attempts) - 1),
        attempts=task.attempts,
    )


def settled_jobs(session: Session, job_id: str) -> tuple[JobInfo, ...]:
    """Return an ended job, or the tasks of an array, by the record of its run or, if Slurm has told
    its end before, by its own record, which lacks what Slurm allocated; () without both. Slurm is not
    asked.
    """
    if collected := collected_jobs(session, job_id):
        return collected
    entry = session.ledger.find(job_id)
    if entry is None or entry.state_at is None:
        return ()
    number = entry.job_id or ""
    # Without a shared folder, the nodes have the records. Jobs without Slurm (m12) have others.
    if not number.isdecimal() or not session.site.folders.are_one:
        return ()
    with suppress(AccountingAwayError, TransportError):
        jobs = recorded_jobs(session.transport, session.ledger, [number])
        # A record without the nodes or the start was not written by the job: the node may have failed.
        # A start after the recorded end means that somebody has started the job again.
        is_known = all(
            job.ended and job.nodes and 0 < (job.start_time or 0) <= entry.state_at for job in jobs
        )
        if jobs and is_known and worst_job(jobs).state.value == entry.state:
            return tuple(job for job in jobs if job_id in (job.id, job.whole_id))
    return ()


def find_or_list(session: Session, ids: Sequence[str], most: int | None = None) -> JobList:
    """Return the jobs with these ids, without ids those of ``list_jobs``, with all their attempts.
    The record of a collected run is final, so Slurm is asked only about the other jobs.
    """
    if not ids:
        listing = list_jobs(session, most)
        return replace(listing, jobs=with_attempts(session, listing.jobs))
    ids = [job_id_of(name, session.ledger) for name in ids]
    collected = {job_id: collected_jobs(session, job_id) for job_id in ids}
    asked = [job_id for job_id in ids if not collected[job_id]]
    found = with_attempts(session, known_jobs(session, asked)) if asked else ()
    jobs = {job.id: job for job in (*found, *(job for own in collected.values() for job in own))}
    return JobList(tuple(jobs.values()))


def running_job(session: Session, job_id: str) -> JobInfo:
    """Return a job that is running, or the only task of an array that is running.

    Raises:
        UsageError: no task or several tasks are running, or the id is malformed.
        SchedulerError: the job is unknown, or belongs to another user.
    """
    jobs = known_jobs(session, [job_id])
    user = session.inventory.job_user
    if jobs[0].user != user:
        raise unmanaged_job_error(jobs[0], user)
    running = [job for job in jobs if job.state is JobState.RUNNING]
    if len(running) == 1:
        return running[0]
    raise UsageError(
        f"{len(running)} tasks of job {job_id} are running"
        if running
        else f"job {job_id} is not running",
        code="ambiguous" if running else "not-running",
        about="task" if running else "job",
        why="" if running else f"its state is {jobs[0].state.value}",
        fix=f"choose a task, such as {running[0].id}"
        if running
        else "`clusterctl jobs` lists the jobs",
    )


def list_jobs(session: Session, most: int | None = None) -> JobList:
    """Return the job user's active and recent jobs, and jobs submitted from this machine.

    Rejected submissions are not listed.

    most: the maximum number of ended jobs, where an array counts as a single job. None: all jobs.
    """
    resolve_submissions(session.scheduler, session.ledger)
    entries = session.ledger.entries()
    refused = {entry.token for entry in entries if entry.refused}
    by_id = {job.id: job for job in session.scheduler.own_jobs() if job.token not in refused}
    listed = {job.whole_id for job in by_id.values()}
    # The queue may have forgotten tasks of an array.
    arrays = dict.fromkeys(job.whole_id for job in by_id.values() if job.task is not None)
    others = [e.job_id for e in entries if e.job_id and e.job_id not in listed and not e.refused]
    queried = others[-most:] if most else others
    unlisted = 0
    try:
        by_id |= {job.id: job for job in session.scheduler.jobs([*queried, *arrays])}
        whole = {job.whole_id for job in by_id.values()}
    except AccountingAwayError as exc:
        by_id |= {job.id: job for job in exc.queued}
        unlisted = len(_missing(others, exc.queued))
        whole = set()
    jobs = tuple(sorted(by_id.values(), key=lambda job: (-job.number, job.task or 0)))
    ids = list(dict.fromkeys(job.whole_id for job in jobs))
    _remember(session, jobs, whole)
    remove_old_secrets(session)
    recent = {*ids[:most]}
    shown = tuple(job for job in jobs if job.whole_id in recent or not job.ended)
    older = len(ids) - len({job.whole_id for job in shown})
    if not unlisted:
        older += len(others) - len(queried)
    return JobList(shown, older, unlisted, session.site.advice.repair)
