"""Ended jobs from the records in their folders, for jobs that neither Slurm's queue nor its
accounting tells.

The script of a job records its start, signals and end (payload/node/job.py). The job can change its
record.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from clusterctl.scheduler.attempts import (
    SKEW_S,
    Attempt,
    Ending,
    Event,
    ending_of,
    events_of,
    recorded_attempts,
)
from clusterctl.scheduler.base import (
    AccountingAwayError,
    JobInfo,
    JobState,
    Outcome,
    comment_of,
    worst_job,
)
from clusterctl.scheduler.parts import fold_tasks, tasks_of
from clusterctl.state.ledger import Change, JobEntry, Ledger
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.progress import Clock
from clusterctl.util.terminal import plain_line

_PROGRAM: Final = "clusterctl.scheduler.remote_logs"
_ARRAY: Final = re.compile(rb"(?m)^#SBATCH\s+(?:--array[=\s]|-a)\s*[\"']?([0-9,:-]+)")
_NO_START: Final = "the job's script ended before the job recorded its start"
_GONE: Final = "the job's folder no longer exists"
_UNREADABLE: Final = "the job's record can't be read"
_LONGEST_ERROR: Final = 2000
# A file system such as NFS may show a file that another host has written so much later.
DELAY_S: Final = 60.0
# Shells exit so with the number of the signal that ended their command.
_BY_SIGNAL: Final = 128
_Record = Mapping[str, Any]


def recorded_jobs(
    transport: Transport, ledger: Ledger, numbers: Collection[str]
) -> tuple[JobInfo, ...]:
    """Return ended jobs, and each task of arrays, as far as ``ledger`` has their folders.

    numbers: ids of jobs that Slurm's queue does not have. An array has a single id.
    Raises AccountingAwayError if the folders can't be read.
    """
    entries = {entry.job_id: entry for entry in ledger.entries() if entry.job_id in numbers}
    known = {job_id: entry.remote_dir for job_id, entry in entries.items() if entry.remote_dir}
    answers = _read(transport, [*known.values()])
    records = dict(zip(known, answers, strict=True))
    return tuple(
        job
        for job_id, entry in entries.items()
        for job in _jobs_of(entry, records.get(job_id), ledger)
    )


def remember_states(ledger: Ledger, jobs: Iterable[JobInfo]) -> None:
    """Record the final states of jobs, and of arrays all of whose tasks have ended, if they are
    new.
    """
    by_id: dict[str, list[JobInfo]] = {}
    for job in jobs:
        by_id.setdefault(job.whole_id, []).append(job)
    for entry in ledger.entries():
        tasks = by_id.get(entry.job_id or "", ())
        if tasks and all(job.ended for job in tasks):
            states = final_states(tasks)
            if (states["state"], states.get("task_states")) != (entry.state, entry.task_states):
                ledger.update(entry, **states)


def final_states(jobs: Sequence[JobInfo]) -> dict[str, Change]:
    """Return the fields of the ledger's entry with the states of an ended job or of an array's
    tasks.
    """
    tasks: dict[str, list[int]] = {}
    for job in jobs:
        if job.task is not None:
            tasks.setdefault(job.state.value, []).append(job.task)
    states: dict[str, Change] = {"state": worst_job(jobs).state.value, "state_at": time.time()}
    if tasks:
        states["task_states"] = " ".join(
            f"{state}:{fold_tasks(tasks[state])}" for state in sorted(tasks)
        )
    return states


def with_comments(ledger: Ledger | None, jobs: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
    """Return jobs from an accounting that may not keep comments with the comments of their
    submissions.
    """
    if ledger is None or all(job.comment for job in jobs):
        return tuple(jobs)
    tokens = {entry.remote_dir: entry.token for entry in ledger.entries() if entry.remote_dir}
    return tuple(
        replace(job, comment=comment_of(tokens[job.work_dir]))
        if not job.comment and job.work_dir in tokens
        else job
        for job in jobs
    )


def with_accounted(job: JobInfo, accounted: Iterable[JobInfo]) -> JobInfo:
    """Return the job with its attempts and first submission in the accounting.

    An earlier job, in another folder, may have had the same id, before Slurm's numbers began again.
    """
    same = next(
        (each for each in accounted if (each.id, each.work_dir) == (job.id, job.work_dir)), None
    )
    if same is None:
        return job
    return replace(job, submit_time=same.submit_time or job.submit_time, attempts=same.attempts)


def with_all_attempts(
    job: JobInfo, events: Sequence[Event], times: Iterable[float] = ()
) -> JobInfo:
    """Return the job with all its attempts, and the start of the first.

    They are ``job.attempts``, which the accounting has, or else those in the job's own record. If a
    person requeues a job that has ended, the accounting ends the attempt only then, so the recorded
    end counts.

    times: see ``recorded_attempts``.
    """
    recorded = [*recorded_attempts(events, sorted(times))]
    attempts = [_until_recorded_end(attempt, recorded) for attempt in job.attempts]
    attempts = attempts or [attempt for attempt, _ in recorded]
    start = job.last_start
    if start is not None and job.nodes:
        if not attempts or (attempts[-1].end_time or start) < start - SKEW_S:
            # The last attempt may have been killed before the job could record its start.
            attempts.append(Attempt(start_time=start, nodes=job.nodes))
        attempts[-1] = replace(attempts[-1], end_time=job.end_time)
    # The accounting may have missed the end of an attempt.
    attempts[:-1] = [
        replace(attempt, end_time=later.start_time) if attempt.end_time is None else attempt
        for attempt, later in pairwise(attempts)
    ]
    first = attempts[0].start_time if attempts else job.start_time
    return replace(job, attempts=tuple(attempts), start_time=first)


def with_recorded_exit(job: JobInfo, events: Sequence[Event]) -> JobInfo:
    """Return the job with the exit code that its own record has, if sacct shows only a part of it.

    sacct subtracts 128 from exit codes from 128 on (src/sacct/print.c of Slurm): a shell's 139, for
    a segmentation fault, becomes 11.
    """
    if not may_lack_128(job) or not events:
        return job
    recorded = ending_of(events).exit_code or 0
    return replace(job, exit_code=recorded) if recorded - _BY_SIGNAL == job.exit_code else job


def may_lack_128(job: JobInfo) -> bool:
    """Return whether a job's exit code is from sacct, which may have subtracted 128 from it."""
    # squeue tells the restarts, and without a scheduler ids have a prefix.
    is_of_sacct = job.restarts is None and not job.prefix
    is_short = job.exit_code is not None and job.exit_code < _BY_SIGNAL
    return is_of_sacct and is_short and job.state is JobState.FAILED and not job.signal


def _until_recorded_end(attempt: Attempt, recorded: Sequence[tuple[Attempt, bool]]) -> Attempt:
    """Return an attempt of the accounting with the end that the job recorded, if that was
    earlier.
    """
    end = attempt.end_time
    if end is None:
        return attempt
    own = [each for each in recorded if attempt.start_time - SKEW_S <= each[0].start_time < end]
    recorded_end, is_recorded = (own[-1][0].end_time or end, own[-1][1]) if own else (end, False)
    return replace(attempt, end_time=min(end, recorded_end)) if is_recorded else attempt


def recorded_job(transport: Transport, ledger: Ledger, token: str) -> JobInfo | None:
    """Return the ended job of a submission without an answer, by the id in its record, if it has
    started.

    Raises AccountingAwayError if its folder can't be read.
    """
    entries = [entry for entry in ledger.entries() if entry.token == token and entry.remote_dir]
    records = _read(transport, [entry.remote_dir or "" for entry in entries])
    for entry, record in zip(entries, records, strict=True):
        texts = [
            str(task.get("events")) for task in (record or {}).values() if isinstance(task, dict)
        ]
        for event in events_of("\n".join(texts)):
            number = str(event.get("job", "")).partition("_")[0]
            if number.isdecimal():
                return next(_jobs_of(replace(entry, job_id=number), record, ledger))
    return None


def await_ends(transport: Transport, clock: Clock, jobs: Sequence[JobInfo]) -> None:
    """Wait until this host sees the recorded ends of ended jobs, and so the last lines of their
    logs.

    jobs: a job, or the tasks of an array. Jobs that a signal has ended may have recorded no end.
    A record that can't be read is not waited for.
    """
    ended = [job for job in jobs if job.ended and job.exit_code is not None and not job.signal]
    ended = [job for job in ended if job.state in (JobState.COMPLETED, JobState.FAILED)]
    latest = max((job.end_time or 0 for job in ended), default=0)
    names = {"" if job.task is None else str(job.task) for job in ended}
    for _ in (
        clock.polls(latest + DELAY_S - time.time(), first_s=0.5, longest_s=5.0) if ended else ()
    ):
        try:
            (record,) = _read(transport, [ended[0].work_dir])
        except AccountingAwayError:
            return
        endings = (_ending(record, name) for name in names)
        if record is None or all(ending is not None and ending.is_recorded for ending in endings):
            return


def _read(transport: Transport, folders: Sequence[str]) -> list[_Record | None]:
    """Return the record of each folder; None for a missing folder. Raise AccountingAwayError."""
    if not folders:
        return []
    command = remote_argv(_PROGRAM, "records")
    answer = transport.run(command, stdin=json.dumps(folders).encode(), check=False)
    with suppress(ValueError, RecursionError):
        records = json.loads(answer.stdout)
        if not answer.rc and isinstance(records, list) and len(records) == len(folders):
            return [record if isinstance(record, dict) else None for record in records]
    raise AccountingAwayError(
        "the jobs' own records can't be read",
        where=f"{folders[0]} on {transport.host}",
        why=(answer.stderr.strip() or answer.stdout)[-_LONGEST_ERROR:],
        fix="`clusterctl jobs` shows the jobs in the queue",
    )


def _jobs_of(entry: JobEntry, record: _Record | None, ledger: Ledger) -> Iterator[JobInfo]:
    """Yield a job, or the tasks of an array. ledger: has a copy of the job's script."""
    job = JobInfo(
        number=int(entry.job_id or 0),
        name=entry.name,
        user=entry.user,
        state=JobState.UNKNOWN,
        reason=_GONE,
        submit_time=int(entry.submitted_at),
        work_dir=entry.remote_dir or "",
        comment=comment_of(entry.token),
    )
    # The states that Slurm told earlier.
    known: dict[int | None, str] = {None: entry.state or ""}
    for words in (entry.task_states or "").split():
        name, _, numbers = words.partition(":")
        known.update(dict.fromkeys(tasks_of(numbers), name))
    if record is None:
        state = JobState.__members__.get(known[None], JobState.UNKNOWN)
        yield from [replace(job, state=state)] if state.outcome is not Outcome.GOES_ON else []
        return
    tasks = {
        *_tasks(ledger.kept_file(entry.token, "job.sbatch")),
        *(int(name) for name in record if name.isdecimal()),
    }
    for task in sorted(tasks) or (None,):
        ending = _ending(record, "" if task is None else str(task)) or ending_of(())
        recorded = JobState(ending.state)
        state = JobState.__members__.get(known.get(task, ""), JobState.UNKNOWN)
        # Slurm's own state is more precise, such as OUT_OF_MEMORY, unless the job was started again
        # since.
        is_new = entry.state_at is None or (ending.started or 0.0) > entry.state_at
        if state.outcome is Outcome.GOES_ON or (is_new and state.outcome is not recorded.outcome):
            state = recorded
        is_recorded = state.outcome is recorded.outcome
        yield replace(
            job,
            task=task,
            state=state,
            reason=ending.reason if is_recorded else "",
            exit_code=ending.exit_code if is_recorded else None,
            signal=0 if is_recorded and ending.exit_code is not None else None,
            nodes=ending.nodes,
            partition=ending.partition,
            restarts=ending.restarts,
            start_time=_seconds(ending.started),
            end_time=_seconds(ending.ended),
        )


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)


def _ending(record: _Record | None, name: str) -> Ending | None:
    """Return how a job or task ended; None if it has not started."""
    record = record or {}
    whole = record.get("")
    # If the folder can't be read, it is unknown whether the task has started.
    unread = whole if isinstance(whole, dict) and whole.get("error") else None
    task = record.get(name, unread)
    if not isinstance(task, dict):
        return None
    written = task.get("written")
    last = float(written) if isinstance(written, int | float) and 0 < written < 1 << 37 else None
    if error := task.get("error"):
        reason = f"{_UNREADABLE} ({plain_line(str(error))})"
        return Ending(state=JobState.PURGED, reason=reason, started=last, ended=last)
    events = events_of(str(task.get("events")))
    if not events:
        return Ending(state="FAILED", reason=_NO_START, is_recorded=False, started=last, ended=last)
    ending = ending_of(events)
    return (
        ending if ending.is_recorded else replace(ending, ended=max(ending.ended or 0, last or 0))
    )


def _tasks(script: bytes) -> Sequence[int]:
    """Return the numbers of the tasks of an array, from the last such option in the job's
    script.
    """
    options = _ARRAY.findall(script)
    return tasks_of(options[-1].decode()) if options else []
