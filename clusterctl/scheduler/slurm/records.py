"""Ended jobs from the records in their folders, for jobs that neither Slurm's queue nor its
accounting tells.

The script of a job records its start, signals and end (payload/node/job.py). The job can change its
record.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from clusterctl.scheduler.base import (
    AccountingAwayError,
    JobInfo,
    JobState,
    Outcome,
    comment_of,
    worst_job,
)
from clusterctl.scheduler.history import SKEW_S, Attempt, Event, attempts_of, events_of
from clusterctl.scheduler.request.arrays import fold_tasks, tasks_of
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.ledger import Change, JobEntry, Ledger
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.progress import Clock
from clusterctl.util.terminal import plain_line

_PROGRAM: Final = "clusterctl.scheduler.ends.remote_logs"
_ARRAY: Final = re.compile(rb"(?m)^#SBATCH\s+(?:--array[=\s]|-a)\s*[\"']?([0-9,:-]+)")
_NO_START: Final = "the job's script ended before the job recorded its start"
_GONE: Final = "the job's folder no longer exists"
_UNREADABLE: Final = "the job's record can't be read"
_LONGEST_ERROR: Final = 2000
# A file system such as NFS may show a file that another host has written so much later.
DELAY_S: Final = 60.0
# Shells exit so with the number of the signal that ended their command.
_BY_SIGNAL: Final = 128
# So long after its start in Slurm, an attempt has recorded its start.
_LAUNCH_S: Final = 15
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
    tasks, and with what they used.
    """
    tasks: dict[str, list[int]] = {}
    for job in jobs:
        if job.task is not None:
            tasks.setdefault(job.state.value, []).append(job.task)
    states: dict[str, Change] = {
        "state": worst_job(jobs).state.value,
        "state_at": time.time(),
    }
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
    """Return the job with its attempts, its steps and its first submission in the accounting.

    An earlier job, in another folder, may have had the same id, before Slurm's numbers began again.
    """
    same = next(
        (each for each in accounted if (each.id, each.work_dir) == (job.id, job.work_dir)), None
    )
    if same is None:
        return job
    return replace(
        job,
        submit_time=same.submit_time or job.submit_time,
        attempts=same.attempts,
        steps=same.steps,
    )


def with_all_attempts(
    job: JobInfo, history: Sequence[Attempt], times: Iterable[float] = ()
) -> JobInfo:
    """Return the job with all its attempts, and the start of the first.

    They are ``job.attempts``, which the accounting has, or else those in the job's own record. If a
    person requeues a job that has ended, the accounting ends the attempt only then, so the recorded
    end counts.

    history: of the job, by its own record.
    times: see ``_recorded_attempts``.
    """
    attempts = [_until_recorded_end(attempt, history) for attempt in job.attempts]
    attempts = attempts or [*_recorded_attempts(history, sorted(times))]
    start = job.last_start
    if start is not None and job.nodes:
        if not attempts or (attempts[-1].end_time or start) < start - SKEW_S:
            # The last attempt may have been killed before the job could record its start.
            attempts.append(AttemptRecord(start_time=start, nodes=job.nodes))
        last = attempts[-1]
        attempts[-1] = replace(
            last,
            end_time=job.end_time,
            state=last.state or (job.state.value if job.ended else ""),
            suspended_s=max(last.suspended_s, job.suspended_s),
        )
    # The accounting may have missed the end of an attempt.
    attempts[:-1] = [
        replace(attempt, end_time=later.start_time) if attempt.end_time is None else attempt
        for attempt, later in pairwise(attempts)
    ]
    first = attempts[0].start_time if attempts else job.start_time
    return replace(job, attempts=tuple(attempts), start_time=first)


def with_recorded_exit(job: JobInfo, history: Sequence[Attempt]) -> JobInfo:
    """Return the job with the exit code that its own record has, if sacct shows only a part of it.

    sacct subtracts 128 from exit codes from 128 on (src/sacct/print.c of Slurm): a shell's 139, for
    a segmentation fault, becomes 11.
    """
    if not may_lack_128(job) or not history:
        return job
    recorded = history[-1].exit_code or 0
    is_short = recorded - _BY_SIGNAL == (job.exit_code or 0)
    return replace(job, exit_code=recorded, signal=0) if is_short else job


def may_lack_128(job: JobInfo) -> bool:
    """Return whether a job's exit code is from sacct, which may have subtracted 128 from it."""
    # squeue tells the restarts, and without a scheduler ids have a prefix.
    is_of_sacct = job.restarts is None and not job.prefix
    is_short = (job.exit_code or 0) < _BY_SIGNAL
    return is_of_sacct and is_short and job.state is JobState.FAILED and not job.signal


def _recorded_attempts(
    history: Sequence[Attempt], times: Sequence[float]
) -> Iterator[AttemptRecord]:
    """Yield each attempt in a job's own record.

    times: in order, at which the job was running, such as those of telemetry. An attempt without a
        recorded end was killed, and ended after the last of these times.
    """
    for attempt in history:
        if attempt.started is None or attempt.since is None:
            continue
        last = attempt.ended or attempt.last or attempt.started
        if not attempt.end:
            before = attempt.again if attempt.following else math.inf
            last = max([last, *[time for time in times if attempt.started < time < before][-1:]])
        yield AttemptRecord(
            start_time=int(attempt.since), end_time=math.ceil(last), nodes=attempt.nodes
        )


def _until_recorded_end(attempt: AttemptRecord, history: Sequence[Attempt]) -> AttemptRecord:
    """Return an attempt of the accounting with the end that the job recorded, if that was
    earlier.
    """
    end = attempt.end_time
    if end is None:
        return attempt
    starts = [each for each in history if each.started is not None]
    own = [each for each in starts if attempt.start_time - SKEW_S <= int(each.started or 0) < end]
    ended = own[-1].ended if own else None
    return attempt if ended is None else replace(attempt, end_time=min(end, math.ceil(ended)))


def restarts_of(
    history: Sequence[Attempt],
    accounted: Iterable[AttemptRecord] = (),
    steps: Iterable[tuple[float, int]] = (),
) -> tuple[Attempt, ...]:
    """Return the attempts of a job after which it was restarted.

    accounted: the attempts that Slurm knows. One that was killed may not have recorded its start or
        its end.
    steps: time and step of each record of metrics that the program wrote.
    """
    known = {attempt.start_time: attempt for attempt in accounted}
    if missing := [*_unrecorded_starts(history, known)]:
        events = [event for each in history for event in (each.start, *each.events) if event]
        history = attempts_of(sorted([*events, *missing], key=lambda event: event["time"]))
    in_order = sorted(steps)
    return tuple(
        attempt._replace(slurm_state=_state_of(attempt, known), steps=in_order)
        for attempt in history[:-1]
    )


def _unrecorded_starts(
    history: Sequence[Attempt], accounted: Mapping[int, AttemptRecord]
) -> Iterator[Event]:
    recorded = [attempt.started for attempt in history if attempt.started is not None]
    # If no start is missing, the clocks of hosts may differ by any time.
    for start, following in (
        pairwise([*sorted(accounted), math.inf]) if len(recorded) < len(accounted) else ()
    ):
        if not any(start - SKEW_S <= time < following - SKEW_S for time in recorded):
            nodes = [*accounted[int(start)].nodes]
            yield {"event": "start", "time": float(start), "nodes": nodes, "unrecorded": True}


def _state_of(attempt: Attempt, accounted: Mapping[int, AttemptRecord]) -> str:
    """Return Slurm's state of an attempt. "": unknown."""
    started = attempt.started or 0
    own = [at for at in accounted if at - SKEW_S <= started <= at + _LAUNCH_S]
    return accounted[max(own)].state if own else ""


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
        if record is None or all(_is_settled(record, name) for name in names):
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
        recorded = _recorded(job, record, "" if task is None else str(task))
        state = JobState.__members__.get(known.get(task, ""), JobState.UNKNOWN)
        # Slurm's own state is more precise, such as OUT_OF_MEMORY, unless the job was started again
        # since.
        is_new = entry.state_at is None or (recorded.start_time or 0) > entry.state_at
        if state.outcome is Outcome.GOES_ON or (
            is_new and state.outcome is not recorded.state.outcome
        ):
            state = recorded.state
        if state.outcome is not recorded.state.outcome:
            recorded = replace(recorded, reason="", exit_code=None, signal=None)
        yield replace(recorded, task=task, state=state)


def _recorded(job: JobInfo, record: _Record, name: str) -> JobInfo:
    """Return a job or task as its own record tells it."""
    task = _task_record(record, name)
    last = _seconds(task.get("written"))
    if error := task.get("error"):
        reason = f"{_UNREADABLE} ({plain_line(str(error))})"
        return replace(job, state=JobState.PURGED, reason=reason, start_time=last, end_time=last)
    attempt = attempts_of(str(task.get("events")))[-1]
    if task and not attempt.has_begun:
        return replace(job, state=JobState.FAILED, reason=_NO_START, start_time=last, end_time=last)
    left = _seconds(attempt.left)
    return replace(
        job,
        state=JobState(attempt.state),
        reason=attempt.state_reason,
        exit_code=attempt.exit_code,
        signal=None if attempt.exit_code is None else 0,
        nodes=attempt.nodes,
        partition=attempt.partition,
        restarts=attempt.number,
        start_time=_seconds(attempt.since),
        end_time=left if attempt.is_recorded else max(left or 0, last or 0),
    )


def _is_settled(record: _Record, name: str) -> bool:
    """Return whether a job or task has recorded its end, or its record can't be read."""
    task = _task_record(record, name)
    attempt = attempts_of(str(task.get("events")))[-1]
    return bool(task.get("error")) or attempt.has_ended


def _task_record(record: _Record, name: str) -> _Record:
    """Return the record of a task; empty if the task has not started."""
    whole = record.get("")
    # If the folder can't be read, it is unknown whether the task has started.
    unread = whole if isinstance(whole, dict) and whole.get("error") else {}
    task = record.get(name, unread)
    return task if isinstance(task, dict) else {}


def _seconds(time: Any) -> int | None:
    """Return a time in whole seconds; None if it is unknown."""
    return int(time) if isinstance(time, int | float) and 0 < time < 1 << 37 else None


def _tasks(script: bytes) -> Sequence[int]:
    """Return the numbers of the tasks of an array, from the last such option in the job's
    script.
    """
    options = _ARRAY.findall(script)
    return tasks_of(options[-1].decode()) if options else []
