"""Tests of the attempts and restarts of a job, read from job.events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterctl.scheduler.attempts import LastAttempt, events_of, last_attempt, restarts_of


def told(*events: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(event)}\n" for event in events)


def start(time: float, restarts: int, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": "start", "restarts": restarts, "nodes": ["n1", "n2"], "until": 0, **fields}


def end(time: float, status: int) -> dict[str, Any]:
    return {"time": time, "event": "end", "status": status}


def requeue(time: float, reason: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": "requeue", "reason": reason, **fields}


KILLED = {"status": 137, "kind": "SIGKILL", "place": "rank 1 on n2", "error": "", "progress": [50, 62, 0]}


def test_restart_has_its_cause_times_and_lost_steps() -> None:
    events = events_of(
        told(start(100, 0), end(130.5, 137), requeue(130.6, "failed", **KILLED), start(140, 1))
    )
    (restart,) = restarts_of(events, [(120.0, 61), (129.0, 62), (142.5, 51), (143.0, 52)])
    assert (restart.number, restart.reason, restart.status) == (1, "failed", 137)
    assert KILLED["place"] in restart.cause
    assert (restart.ended, restart.started, restart.again_s, restart.steps_lost) == (130.5, 140, 12.0, 12)
    assert restart.as_dict()["nodes"] == ["n1", "n2"]
    assert "12 steps lost" in str(restart)
    again = events_of(told(start(1, 0), start(2, 0), start(3, 2)))
    assert [restart.number for restart in restarts_of(again)] == [1, 2]
    lost = events_of(told(start(100, 0), start(140, 1, kind="loss of n2", progress=[50, 62, 0])))
    (unseen,) = restarts_of(lost, [(120.0, 61), (129.0, 62), (142.5, 51)])
    assert (unseen.ended, unseen.again_s, unseen.steps_lost) == (None, 13.5, 12)
    (alone,) = restarts_of(events)
    assert (alone.again_s, alone.steps_lost) == (None, None)


HANG = {"time": 4, "event": "hang", "seconds": 90, "summary": "rank 1 at x.py:3"}
ERROR = {"kind": "exit code 1", "error": "KeyError at x.py:3"}


@pytest.mark.parametrize(
    ("events", "following", "cause"),
    [
        ([end(5, 75), requeue(5, "saved", kind="saved")], {}, "saved"),
        ([end(5, 75), requeue(5, "")], {}, "exit status 75"),
        ([end(5, 1), requeue(5, "failed", **ERROR)], {}, "KeyError at x.py:3"),
        # job.py of the next attempt describes the loss of a node.
        ([], {"kind": "loss of n1,n2", "place": ""}, "loss of n1, n2"),
        ([], {}, "n1, n2"),
        ([HANG, end(5, 137), requeue(5, "hang", kind="hang")], {}, "rank 1 at x.py:3"),
    ],
    ids=["saved", "old", "error", "loss", "unknown", "hang"],
)
def test_cause_of_a_restart(events: list[dict[str, Any]], following: dict[str, Any], cause: str) -> None:
    (restart,) = restarts_of(events_of(told(start(1, 0), *events, start(9, 1, **following))))
    assert cause in restart.cause
    assert restart.noticed_s == (90 if HANG in events else None)


def test_last_attempt_ignores_earlier_ones() -> None:
    hang = {"time": 3, "event": "hang", "seconds": 60, "summary": "rank 0"}
    warned = [start(9, 1), {**hang, "action": "warn"}, {"time": 8, "event": "stop", "reason": "same-error"}]
    events = events_of(told(start(1, 0), {**hang, "action": "end"}, requeue(5, "hang"), *warned))
    assert last_attempt(events) == LastAttempt(number=1, stop="same-error")
    assert last_attempt(events[:2]) == LastAttempt(hang="rank 0", hang_s=60)
    assert last_attempt(()) == LastAttempt()


@pytest.mark.parametrize("value", [None, True, "x", -1, 2**39, 10**400, [], {}, [1], "\x1b[2J"])
@pytest.mark.parametrize(
    "key", ["time", "restarts", "nodes", "kind", "place", "error", "progress", "reason", "status"]
)
def test_hostile_events_are_read(key: str, value: object) -> None:
    line = {**start(1, 0), **KILLED, "reason": "failed", key: value}
    lines = [{**line, "event": event} for event in ("start", "end", "requeue", "hang", "stop", "start")]
    events = events_of(f"[]\n{{\n{'[' * 5000}\n{told(*lines)}")
    last_attempt(events)
    for restart in restarts_of(events, [(5.0, 3)]):
        assert f"{restart}{json.dumps(restart.as_dict())}".isprintable()
