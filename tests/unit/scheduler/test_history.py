"""The history of a job, read from job.events: attempts, restarts, hangs, alarms and the end."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.base import JobInfo, JobState, elapsed_of
from clusterctl.scheduler.history import Attempt, Hang, attempts_of, is_notice, left_mpi
from clusterctl.scheduler.slurm.records import (
    restarts_of,
    with_accounted,
    with_all_attempts,
    with_recorded_exit,
)
from clusterctl.state.attempts import AttemptRecord


def history(*events: dict[str, Any]) -> tuple[Attempt, ...]:
    return attempts_of("".join(f"{json.dumps(event)}\n" for event in events))


def start(time: float, restarts: int, **fields: Any) -> dict[str, Any]:
    return {
        "time": time,
        "event": "start",
        "restarts": restarts,
        "nodes": ["n1", "n2"],
        "until": 0,
        **fields,
    }


def end(time: float, status: int) -> dict[str, Any]:
    return {"time": time, "event": "end", "status": status}


def requeue(time: float, reason: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": "requeue", "reason": reason, **fields}


def term(time: float, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": "signal", "signal": "SIGTERM", **fields}


KILLED = {
    "status": 137,
    "kind": "SIGKILL",
    "place": "rank 1 on n2",
    "error": "",
    "progress": [50, 62, 0],
}


# Of both attempts: (time, step) of what the program has measured. The second repeats 12 steps.
STEPS = [(120.0, 61), (129.0, 62), (142.5, 51), (143.0, 52)]


def test_restart_has_its_cause_times_and_lost_steps() -> None:
    ended = [end(130.5, 137), requeue(130.6, "failed", **KILLED)]
    (restart,) = restarts_of(history(start(100, 0), *ended, start(140, 1)), (), STEPS)
    assert restart.as_dict() == {
        "number": 1,
        "cause": "SIGKILL in rank 1 on n2",
        "reason": "failed",
        "status": 137,
        "nodes": ["n1", "n2"],
        "ended": 130.5,
        "started": 140,
        "noticed_s": None,
        "again_s": 12.0,
        "steps_lost": 12,
    }
    assert "12 steps lost" in str(restart)


def test_restart_whose_end_was_not_recorded_is_timed_from_the_last_kept_step() -> None:
    """A node was lost, and nobody could write how the first attempt ended."""
    lost = start(140, 1, kind="loss of n2", progress=[50, 62, 0])
    (restart,) = restarts_of(history(start(100, 0), lost), (), STEPS[:3])
    assert restart.ended is None
    assert restart.again_s == 13.5
    assert restart.steps_lost == 12


def test_restart_of_a_program_that_measures_no_steps_has_unknown_losses() -> None:
    ended = [end(130.5, 137), requeue(130.6, "failed", **KILLED)]
    (restart,) = restarts_of(history(start(100, 0), *ended, start(140, 1)))
    assert restart.again_s is None
    assert restart.steps_lost is None


def test_restarts_have_the_numbers_of_slurm_unless_one_is_repeated() -> None:
    restarts = restarts_of(history(start(1, 0), start(2, 0), start(3, 2)))
    assert [restart.restart for restart in restarts] == [1, 2]


HANG = {"time": 94, "event": "hang", "seconds": 90, "summary": "rank 1 at x.py:3"}
ERROR = {"kind": "exit code 1", "error": "KeyError at x.py:3"}
USR1 = {"time": 4, "event": "signal", "signal": "SIGUSR1"}
NOTICE = {**USR1, "notice": True}


@pytest.mark.parametrize(
    ("events", "after"),
    [
        ([NOTICE, end(6, 0)], "2s after SIGUSR1"),
        ([{**NOTICE, "signal": "SIGTERM", "state": "RUNNING"}, end(4, 0)], "0s after SIGTERM"),
        # Near misses: a person has sent it, the program has ignored it, or no end is known.
        ([USR1, end(6, 0)], ""),
        ([{**NOTICE, "ignored": True}, end(6, 0)], ""),
        ([NOTICE], ""),
    ],
)
def test_end_after_the_signal_before_the_time_limit_is_told(
    events: list[dict[str, Any]], after: str
) -> None:
    note = history(start(1, 0), *events)[-1].after_notice
    assert (after in note, "--signal" in note) == (True, bool(after))


KILLED_BY_NOTICE = {"kind": "SIGUSR1", "place": "rank 1 on n2"}


@pytest.mark.parametrize(
    ("events", "following", "cause"),
    [
        ([end(5, 75), requeue(5, "saved", kind="saved")], {}, "saved"),
        ([end(5, 75), requeue(5, "")], {}, "exit status 75"),
        ([end(5, 1), requeue(5, "failed", **ERROR)], {}, "KeyError at x.py:3"),
        # job.py of the next attempt describes the loss of a node.
        ([], {"kind": "loss of n1,n2", "place": ""}, "loss of n1, n2"),
        ([], {}, "n1, n2: a node was lost, the job's processes were killed, or Slurm requeued"),
        # Slurm has told the job why it ends the attempt.
        ([term(5, state="PREEMPTED"), end(5, 143)], {}, "preempted by a job of higher priority"),
        ([term(5, state="PREEMPTED"), end(5, 75)], {}, "priority; the program saved its work"),
        ([term(5, state="REQUEUED"), end(5, 143)], {}, "requeued by its user or an administrator"),
        ([term(5, state="REQUEUED")], {}, "requeued by its user or an administrator"),
        (
            [term(5, state="TIMEOUT"), end(5, 143), requeue(5, "failed", kind="SIGTERM")],
            {},
            "time limit",
        ),
        (
            [NOTICE, term(5, state="TIMEOUT"), end(5, 143), requeue(5, "failed", kind="SIGTERM")],
            {},
            "limit was reached; the program did not save its work after the notice (SIGUSR1)",
        ),
        (
            [NOTICE, term(5, state="TIMEOUT"), end(5, 75)],
            {},
            "limit was reached; the program saved its work",
        ),
        (
            [end(5, 75), requeue(5, "saved", kind="exit code 75 without a signal")],
            {},
            "code 75 without a signal",
        ),
        ([term(5, state="NODE_FAIL"), end(5, 143)], {"kind": "loss of n2"}, "loss of n2"),
        ([term(5, state="NODE_FAIL"), end(5, 143)], {}, "a node of the job failed"),
        ([end(5, 0)], {}, "the job had completed, and was requeued"),
        (
            [NOTICE, end(5, 138), requeue(5, "failed", **KILLED_BY_NOTICE)],
            {},
            "rank 1 on n2 does not handle",
        ),
        # Near misses: none of these is a preemption, a time limit or the notice before it.
        ([term(5, state="RUNNING"), end(5, 143)], {}, "exit status 143"),
        ([term(5, state=""), end(5, 143)], {}, "exit status 143"),
        ([term(3, state="PREEMPTED"), term(4, state="RUNNING"), end(5, 1)], {}, "exit status 1"),
        (
            [USR1, end(5, 138), requeue(5, "failed", **KILLED_BY_NOTICE)],
            {},
            "SIGUSR1 in rank 1 on n2",
        ),
        (
            [NOTICE, end(5, 139), requeue(5, "failed", kind="SIGSEGV", place="rank 0")],
            {},
            "SIGSEGV in rank 0",
        ),
        ([NOTICE, end(5, 75), requeue(5, "saved", kind="saved")], {}, "the program saved its work"),
        ([HANG, end(5, 137), requeue(5, "hang", kind="hang")], {}, "rank 1 at x.py:3"),
    ],
)
def test_restarts_of_gives_the_cause_of_each_end(
    events: list[dict[str, Any]], following: dict[str, Any], cause: str
) -> None:
    (restart,) = restarts_of(history(start(1, 0), *events, start(9, 1, **following)))
    assert cause in restart.cause
    assert restart.noticed_s == (90 if HANG in events else None)


@pytest.mark.parametrize(
    ("events", "state", "cause"),
    [
        ([], "PREEMPTED", "preempted by a job of higher priority"),
        ([], "REQUEUED", "requeued by Slurm, its user or an administrator on n1, n2"),
        ([], "NODE_FAIL", "a node of the job failed"),
        ([], "FAILED", "no end was recorded on n1, n2"),
        ([], "", "no end was recorded on n1, n2"),
        # What the job has recorded counts.
        ([end(5, 1)], "REQUEUED", "exit status 1"),
        ([end(5, 137), requeue(5, "failed", **KILLED)], "REQUEUED", "SIGKILL in rank 1 on n2"),
        (
            [end(5, 137), requeue(5, "failed", **KILLED, code=137)],
            "REQUEUED",
            "exit code 137 in rank 1 on n2",
        ),
        ([end(5, 75), requeue(5, "saved", kind="saved")], "REQUEUED", "the program saved its work"),
    ],
)
@pytest.mark.parametrize("started", [98, 100])
def test_restart_without_a_recorded_end_has_the_cause_of_the_accounting(
    events: list[dict[str, Any]], state: str, cause: str, started: int
) -> None:
    later = [{**event, "time": event["time"] + 100} for event in events]
    attempts = (AttemptRecord(start_time=started, end_time=106, nodes=("n1", "n2"), state=state),)
    (restart,) = restarts_of(history(start(100, 0), *later, start(110, 1)), attempts)
    assert cause in restart.cause
    # Other attempts in the accounting tell nothing about this one.
    others = (replace(attempts[0], start_time=80), AttemptRecord(start_time=109))
    unrecorded = history(start(100, 0), start(110, 1))
    assert restarts_of(unrecorded, others) == restarts_of(unrecorded)


def test_restart_time_is_local_on_screen_and_utc_in_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        (restart,) = restarts_of(history(start(1, 0), end(1795817403, 1), start(1795817410, 1)))
        assert "17:10:03:" in str(restart)
        assert "22:10:03 UTC:" in restart.in_utc
    finally:
        monkeypatch.undo()
        time.tzset()


def test_last_attempt_ignores_earlier_attempts() -> None:
    hang = {"time": 103, "event": "hang", "seconds": 60, "summary": "rank 0"}
    stopped = [start(109, 1), {"time": 108, "event": "stop", "reason": "no-progress"}]
    events = history(start(1, 0), {**hang, "action": "end"}, requeue(105, "hang"), *stopped)
    first, last = events
    assert (last.number, last.stop, last.hang, last.is_open) == (1, "no-progress", None, False)
    assert first.hang == Hang("rank 0", since=43, noticed=103, until=103, ended_job=True)
    (none,) = history()
    assert (none.number, none.stop, none.hang, none.is_open) == (0, "", None, False)


@pytest.mark.parametrize(
    ("later", "is_open"),
    [
        ([], True),
        ([{"time": 4, "event": "signal", "signal": "SIGUSR1"}], True),
        ([end(5, 137)], False),
        ([requeue(5, "failed", **KILLED)], False),
        ([{"time": 5, "event": "stop", "reason": "usage"}], False),
        ([term(5, state="CANCELLED")], False),
    ],
)
def test_attempt_without_an_end_or_sigterm_is_open(
    later: list[dict[str, Any]], is_open: bool
) -> None:
    assert history(start(1, 0), end(2, 0), start(3, 1), *later)[-1].is_open is is_open


PROGRESS = {"time": 120, "event": "progress"}


def alarm(at: float, kind: str = "idle", **fields: Any) -> dict[str, Any]:
    return {"time": at, "event": "alarm", "kind": kind, "seconds": 60, "summary": kind, **fields}


@pytest.mark.parametrize(
    ("events", "spans", "lasting"),
    [
        ([alarm(100)], [(40, 100)], ["idle"]),
        ([alarm(100), {"time": 150, "event": "alarm-over", "kind": "idle"}], [(40, 150)], []),
        # Another kind ends no alarm.
        ([alarm(100), {"time": 150, "event": "alarm-over", "kind": "data"}], [(40, 100)], ["idle"]),
        # An alarm that names more is the same alarm.
        ([alarm(100), alarm(130, summary="two", seconds=90)], [(40, 130)], ["idle"]),
        ([alarm(100), alarm(110, "data")], [(40, 100), (50, 110)], ["idle", "data"]),
        ([alarm(100), end(120, 0)], [(40, 120)], ["idle"]),
        ([alarm(100), requeue(120, "failed"), start(130, 1)], [(40, 100)], []),
    ],
)
def test_alarm_lasts_until_it_is_over(
    events: list[dict[str, Any]], spans: list[tuple[float, float]], lasting: list[str]
) -> None:
    read = history(start(1, 0), *events)
    alarms = [found for attempt in read for found in attempt.all_alarms]
    assert [(found.since, found.until) for found in alarms] == spans
    assert [found.kind for found in read[-1].alarms] == lasting


def test_alarm_that_ends_the_job_says_so() -> None:
    (found,) = history(start(1, 0), alarm(100, action="end"))[0].all_alarms
    assert found.ended_job
    assert str(found) == "idle, for 1m"


@pytest.mark.parametrize(
    ("later", "until", "lasts"),
    [
        ([], 100, True),
        ([end(120, 143)], 120, True),
        ([PROGRESS], 120, False),
        ([PROGRESS, end(150, 0)], 120, False),
        ([{**PROGRESS, "age": 0.75}], 119.25, False),
        ([{**PROGRESS, "age": -1e9}], 120, False),
        ([{**PROGRESS, "age": 1e9}], 118, False),
    ],
    ids=["running", "until-the-end", "over", "long-over", "noticed-later", "negative", "huge"],
)
def test_hang_lasts_until_the_next_progress(
    later: list[dict[str, Any]], until: float, lasts: bool
) -> None:
    warned = {**HANG, "time": 100, "action": "warn"}
    events = history(start(1, 0), warned, *later)
    (hang,) = events[0].hangs
    assert (hang.since, hang.until, hang.ended_job) == (10, until, False)
    assert events[0].hang == (hang if lasts else None)
    two = history(start(1, 0), warned, PROGRESS, {**warned, "time": 300})
    assert [hang.since for hang in two[0].hangs] == [10, 210]
    assert (two[0].hang or hang).since == 210


@pytest.mark.parametrize("value", [None, True, "x", -1, 2**39, 10**400, [], {}, [1], "\x1b[2J"])
@pytest.mark.parametrize(
    "key",
    "time restarts nodes kind place error progress reason status seconds summary action".split(),
)
def test_events_of_ignores_malformed_events(key: str, value: object) -> None:
    line = {**start(1, 0), **KILLED, "reason": "failed", key: value}
    lines = [
        {**line, "event": event} for event in ("start", "end", "requeue", "hang", "stop", "start")
    ]
    text = "".join(f"{json.dumps(event)}\n" for event in lines)
    read = attempts_of(f"[]\n{{\n{'[' * 5000}\n{text}")
    for attempt in read:
        for hang in attempt.hangs:
            assert f"{hang}{json.dumps(hang.as_dict())}".isprintable()
        assert f"{attempt.state}{attempt.exit_code}{attempt.left}{attempt.progress}".isprintable()
    for restart in restarts_of(read, (), [(5.0, 3)]):
        assert f"{restart}{json.dumps(restart.as_dict())}".isprintable()


@pytest.mark.parametrize(
    ("events", "state", "exit_code", "ended"),
    [
        ([], "CANCELLED", None, None),
        ([start(1, 0), end(5, 0)], "COMPLETED", 0, 5),
        ([start(1, 0), end(5, 3)], "FAILED", 3, 5),
        ([start(1, 0), term(5, state="TIMEOUT"), end(6, 143)], "TIMEOUT", None, 6),
        ([start(1, 0), term(5, state="TIMEOUT")], "TIMEOUT", None, 5),
        ([start(1, 0), term(5, state="CANCELLED"), end(6, 0)], "CANCELLED", None, 6),
        ([start(1, 0), term(5, state="CANCELLED")], "CANCELLED", None, 5),
        ([start(1, 0), end(5, 0), term(6, state="CANCELLED")], "CANCELLED", None, 6),
        ([start(1, 0), term(5, state="PREEMPTED")], "PREEMPTED", None, 5),
        ([start(1, 0), term(5, state="NODE_FAIL")], "NODE_FAIL", None, 5),
        # `scancel --signal=TERM` only sends a signal.
        (
            [start(1, 0), term(5, state="CANCELLED"), term(5, state="RUNNING"), end(6, 3)],
            "FAILED",
            3,
            6,
        ),
        # Without Slurm's line in the log, only the time tells who sent the signal.
        ([start(1, 0, until=9), term(5, state="")], "TIMEOUT", None, 5),
        ([start(1, 0, until=90), term(5)], "CANCELLED", None, 5),
        ([start(1, 0), term(5)], "CANCELLED", None, 5),
        # The job left the queue while it waited to start again.
        ([start(1, 0), end(5, 75), requeue(5, "saved")], "CANCELLED", None, 5),
        ([start(1, 0), term(5, state="REQUEUED"), end(6, 143)], "CANCELLED", None, 6),
        # Slurm refused to requeue the job.
        ([start(1, 0), end(5, 75), requeue(5, "saved"), end(6, 75)], "FAILED", 75, 6),
        ([start(1, 0), end(5, 75), requeue(5, "saved"), start(7, 1), end(9, 0)], "COMPLETED", 0, 9),
        ([start(1, 0), term(5, state="REQUEUED"), start(7, 1)], "FAILED", None, 7),
        # The job can write anything.
        (
            [{**start(1, 0), "nodes": 3, "restarts": "x"}, term(5, state=["x"]), end(6, 0)],
            "CANCELLED",
            None,
            6,
        ),
        ([end(6, 4)], "FAILED", 4, 6),
        # The job of `submit --first` did not run, and has recorded no start.
        ([{"event": "not-first", "time": 5, "owner": "7"}], "CANCELLED", None, 5),
    ],
)
def test_ending_of_has_state_exit_code_and_time_of_the_last_attempt(
    events: list[dict[str, Any]], state: str, exit_code: int | None, ended: float | None
) -> None:
    last = history(*events)[-1]
    assert last.state == state
    assert last.exit_code == exit_code
    assert last.left == ended


def test_ending_has_the_facts_of_the_start() -> None:
    last = history(start(1, 0), start(7, 2, partition="short"), end(9, 0))[-1]
    assert last.nodes == ("n1", "n2")
    assert last.partition == "short"
    assert last.number == 2
    assert last.started == 7
    assert last.is_recorded


def test_ending_that_nobody_recorded_is_known_as_such() -> None:
    (killed,) = history(start(1, 0))
    assert not killed.is_recorded
    assert killed.state_reason


def attempt(start: int, end: int | None, *nodes: str) -> AttemptRecord:
    return AttemptRecord(start_time=start, end_time=end, nodes=nodes or ("n1", "n2"))


def job(*attempts: AttemptRecord, **fields: Any) -> JobInfo:
    facts = {"number": 7, "name": "mine", "user": "ada", "state": JobState.COMPLETED, "reason": ""}
    return JobInfo(**{**facts, "attempts": attempts, **fields})


def test_elapsed_of_an_array_is_from_its_first_start_to_its_last_end() -> None:
    """Not its longest task: tasks of an array may run one after the other."""
    first = job(task=0, start_time=100, end_time=103)
    later = job(task=1, start_time=350, end_time=352)
    waiting = job(task=2, state=JobState.PENDING)
    assert elapsed_of([first, later]) == 252
    assert elapsed_of([later, first]) == 252
    assert elapsed_of([waiting, replace(waiting, task=3)]) is None
    assert elapsed_of([later]) == 2
    never_started = job(task=2, state=JobState.CANCELLED, end_time=9999)
    assert elapsed_of([first, later, never_started]) == 252
    restarted = job(attempt(50, 60), attempt(200, 210), task=3, start_time=200, end_time=210)
    assert elapsed_of([restarted, first]) == 160
    assert elapsed_of([restarted]) == 20
    now = int(time.time())
    for active in (waiting, job(task=2, state=JobState.RUNNING, start_time=now)):
        elapsed_s = elapsed_of([replace(first, start_time=now - 90, end_time=now - 80), active])
        assert elapsed_s is not None
        assert elapsed_s >= 90


def test_requeue_of_an_ended_job_keeps_the_recorded_end() -> None:
    """The accounting ends an attempt at the requeue, here 40 s after the program's end."""
    again = job(
        attempt(100, 142), attempt(150, 160, "n1"), start_time=150, end_time=160, nodes=("n1",)
    )
    recorded = history(start(101, 0), end(102.4, 3), start(151, 1), end(155, 0))
    known = with_all_attempts(again, recorded)
    # The nodes were free from the program's end to the requeue. At the last end, Slurm itself freed
    # them.
    last = replace(attempt(150, 160, "n1"), state="COMPLETED")
    assert known.attempts == (attempt(100, 103), last)
    assert known.start_time == 100
    assert known.last_start == 150
    assert known.elapsed_s == 13
    assert with_all_attempts(known, recorded) == known
    waiting = replace(
        again, state=JobState.PENDING, attempts=again.attempts[:1], start_time=None, nodes=()
    )
    assert with_all_attempts(waiting, recorded[:1]).attempts == (attempt(100, 103),)
    late = with_all_attempts(again, history(start(101, 0), end(170, 3)))
    assert late.attempts[0] == attempt(100, 142)
    killed = with_all_attempts(
        again, history(start(101, 0), {"time": 102, "event": "signal", "signal": "SIGUSR1"})
    )
    assert killed.attempts[0] == attempt(100, 142)
    # The accounting may have missed an end.
    open_end = replace(again, attempts=(attempt(100, None), *again.attempts[1:]))
    assert with_all_attempts(open_end, ()).attempts[0] == attempt(100, 150)


@pytest.mark.parametrize(
    ("shown", "recorded", "code"),
    [(11, 139, 139), (None, 128, 128), (3, 3, 3), (3, 5, 3), (11, None, 11), (1, 129, 129)],
)
def test_exit_code_truncated_by_sacct_is_replaced_by_the_recorded_code(
    shown: int | None, recorded: int | None, code: int
) -> None:
    failed = job(state=JobState.FAILED, exit_code=shown, signal=0)
    events = history(start(101, 0), *([] if recorded is None else [end(150, recorded)]))
    assert with_recorded_exit(failed, events).exit_code == code
    # The queue has the whole exit code, and the number of restarts.
    queued = replace(failed, restarts=0)
    assert with_recorded_exit(queued, events) == queued
    without_scheduler = replace(failed, prefix="m")
    assert with_recorded_exit(without_scheduler, events) == without_scheduler
    by_signal = replace(failed, signal=9)
    assert with_recorded_exit(by_signal, events) == by_signal


def test_attempts_without_accounting_are_read_from_the_events() -> None:
    """An attempt that was killed ended after the last time at which the job is known to have
    run.
    """
    killed = job(start_time=150, end_time=160, nodes=("n1",))
    recorded = history(start(100, 0), start(151, 1, nodes=["n1"]))
    assert with_all_attempts(killed, recorded, (99, 120.5, 155)).attempts == (
        attempt(100, 121),
        replace(attempt(151, 160, "n1"), state="COMPLETED"),
    )
    unseen = with_all_attempts(killed, history(start(100, 0)), (120,))
    assert [each.end_time for each in unseen.attempts] == [120, 160]
    assert with_all_attempts(job(start_time=5, end_time=9, nodes=("n1",)), ()).attempts == (
        replace(attempt(5, 9, "n1"), state="COMPLETED"),
    )
    # Slurm gave the nodes before its checks, which take time.
    checked = history(start(100, 0, since=92), end(110, 3))
    assert with_all_attempts(job(end_time=110), checked).attempts == (attempt(92, 110),)
    # The clock of the node is two seconds behind that of Slurm.
    behind = with_all_attempts(
        killed, history(start(100, 0), end(120, 3), start(148, 1), end(149, 0))
    )
    assert [each.start_time for each in behind.attempts] == [100, 148]
    assert with_all_attempts(job(state=JobState.CANCELLED, end_time=9), ()).elapsed_s is None


def test_accounting_of_another_job_with_the_id_is_not_taken() -> None:
    own = job(work_dir="/a", submit_time=50)
    accounted = job(attempt(1, 2), attempt(3, 4), work_dir="/a", submit_time=1)
    assert with_accounted(own, [replace(accounted, work_dir="/b")]) == own
    known = with_accounted(own, [accounted])
    assert known == replace(own, attempts=accounted.attempts, submit_time=1)


def test_restart_after_a_refused_start_names_the_drained_node() -> None:
    """The next start was three seconds later, so that both are near it."""
    why = "clusterctl health: /shared is not mounted"
    accounted = [
        AttemptRecord(start_time=986, end_time=987, nodes=("n1",), state="REQUEUED"),
        AttemptRecord(start_time=989, end_time=993, nodes=("n2",), state="COMPLETED"),
    ]
    began = history(start(990.2, 1, nodes=["n2"], drained={"n1": why, "n9": "disk"}), end(993, 0))
    (refused,) = restarts_of(began, accounted)
    assert (refused.nodes, refused.drained) == (("n1",), {"n1": why})
    assert why in refused.cause


def test_attempt_that_recorded_no_start_is_a_restart() -> None:
    events = history(start(101, 0), end(110, 1), start(161, 2))
    assert [restart.again for restart in restarts_of(events)] == [161]
    nodes = {100: ("n1", "n2"), 130: ("n3",), 160: ("n1", "n2")}
    starts = [AttemptRecord(start_time=at, nodes=of_start) for at, of_start in nodes.items()]
    unseen, last = restarts_of(events, starts)
    assert (unseen.restart, unseen.again, unseen.ended, unseen.status) == (1, 130, 110, 1)
    assert (last.restart, last.again, last.ended, last.nodes) == (2, 161, None, ("n3",))
    behind = [
        replace(each, start_time=each.start_time + 30) for each in starts if each.start_time != 130
    ]
    assert restarts_of(events, behind) == restarts_of(events)


def test_last_attempt_has_the_last_sent_signal() -> None:
    signals = [{"time": 3, "event": "signal", "signal": name} for name in ("SIGTERM", "SIGUSR1")]
    assert history(start(1, 0), *signals, end(5, 143))[-1].signal == "SIGUSR1"
    assert history(start(1, 0), *signals, start(6, 1))[-1].signal == ""


@pytest.mark.parametrize(
    ("line", "is_asked"),
    [
        ("#SBATCH --signal=USR1@60", True),
        ("#SBATCH --signal USR1@60", True),
        ("#SBATCH --signal=B:SIGUSR1@60", True),
        ("#SBATCH --signal=b:sigusr1@60", True),
        ("#SBATCH --signal=USR1", True),
        ("#SBATCH --time=10 --signal=USR1@60", True),
        ("#SBATCH --signal=USR1@60  # save before the end", True),
        ("#SBATCH --signal=10@60", True),
        ("#SBATCH --signal=USR1@60\n#SBATCH --signal=USR2@60", False),
        ("#SBATCH --signal=USR2@60", False),
        ("#SBATCH --signal=USR1@10", False),
        ("#SBATCH --comment='--signal=USR1@60'", False),
        ('#SBATCH --comment="--signal=USR1@60', False),
        ("# --signal=USR1@60", False),
        ("#SBATCH --signal=99@60", False),
    ],
)
def test_is_notice_reads_the_option_as_sbatch_does(line: str, *, is_asked: bool) -> None:
    script = f"#!/bin/bash\n{line}\nsrun train\n"
    assert is_notice(script, "SIGUSR1", left_s=100) is is_asked
    assert not is_notice(script, "SIGUSR1", left_s=200)


PMIX = (
    "slurmstepd-n1: error:  mpi/pmix_v4: _errhandler: n1 [0]: pmixp_client_v2.c:212: Error handler "
    "invoked: status = {}, source = [slurm.pmix.5.0:1]\n"
)


@pytest.mark.parametrize(
    ("log", "ended", "rank"),
    [
        (PMIX.format(-61), (), (1, "n1")),
        # Only the loss of a connection.
        (PMIX.format(-25), (), None),
        (PMIX.format(-61), (1,), None),
        (PMIX.format(-61) + "srun: error: n1: tasks 0-2: Killed\n", (), None),
        (PMIX.format(-61) + "\nclusterctl: restart 1 of this job\n", (), None),
    ],
)
def test_left_mpi_names_a_rank_that_ended_without_failure(
    log: str, ended: tuple[int, ...], rank: tuple[int, str] | None
) -> None:
    assert left_mpi(log, ended) == rank


def test_payload_has_this_module() -> None:
    root = Path(__file__).parents[3]
    sent, own = root / "payload/node/history.py", root / "clusterctl/scheduler/history.py"
    assert sent.read_bytes() == own.read_bytes()
