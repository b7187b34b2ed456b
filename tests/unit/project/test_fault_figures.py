"""The figures of benchmarks/faults.py, computed from observations of a training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.support.nodes import Nodes
from benchmarks.support.watched import Figures, Seen, Training, end_of, figures

IDLE = {"n1": "allocated", "n2": "allocated", "n3": "idle"}
END = {"event": "end", "time": 60.0, "status": 0}


def start(time: float) -> dict[str, Any]:
    return {"event": "start", "time": time}


def seen(
    *steps: tuple[float, int], states: list[tuple[float, dict[str, str], str]] | None = None
) -> Seen:
    observed = Seen([], states or [])
    for time, step in steps:
        observed.add(float(time), step)
    return observed


def compute(
    observed: Seen, *events: dict[str, Any], at: float = 10, until: float = 100, done: int = 0
) -> Figures:
    runs = [{"time": 1.0, "done": 0}, {"time": 30.5, "done": done}]
    return figures(at, until, observed, events, runs)


def test_harmless_fault_has_no_sign_and_no_stall() -> None:
    observed = seen(
        (9, 90), (10.5, 100), (11, 110), states=[(11, IDLE, "RUNNING"), (61, IDLE, "COMPLETED")]
    )
    assert compute(observed, start(1), END) == Figures(None, "", 0, 1, 0, doubled=False)


def test_stall_ends_with_the_next_iteration() -> None:
    assert compute(seen((9, 90), (10.2, 100), (31, 101), (32, 102)), start(1), END).again == 21


@pytest.mark.parametrize("last", [9, 10.2])
@pytest.mark.parametrize("events", [[], [{**END, "status": 137}]])
def test_training_that_fails_or_hangs_has_no_recovery(
    last: float, events: list[dict[str, Any]]
) -> None:
    """The iteration in which the fault happens may still be recorded."""
    assert compute(seen((last, 90)), start(1), *events).again is None


def test_restart_counts_from_its_first_iteration() -> None:
    """The iteration of the old start after the fault is not the restart; 90 to 101 are repeated."""
    observed = seen((9, 90), (10.1, 101), (31, 91), (32, 92))
    events = (start(1), {"event": "requeue", "time": 12.0}, start(30))
    assert compute(observed, *events, END, done=90) == Figures(
        2, "requeue", 21, 2, 11, doubled=False
    )


@pytest.mark.parametrize(
    ("states", "sign"),
    [
        ([(12, {**IDLE, "n2": "allocated*"}, "RUNNING")], "n2 allocated*"),
        ([(12, {**IDLE, "n2": "completing"}, "PENDING")], "job PENDING"),
        ([(9, {**IDLE, "n3": "down"}, "RUNNING"), (12, {}, "")], ""),
    ],
)
def test_signs_are_states_after_the_fault(
    states: list[tuple[float, dict[str, str], str]], sign: str
) -> None:
    found = compute(seen((9, 90), states=states), start(1))
    assert (found.noticed, found.sign) == (2 if sign else None, sign)


def test_iterations_of_two_writers_count_as_doubled() -> None:
    """After the restart at 91, the old start writes iteration 102."""
    observed = seen((9, 101), (31, 91), (31.1, 102), (31.2, 92))
    assert compute(observed, start(1), start(30)).doubled
    assert not compute(seen((9, 101), (31, 91), (31.2, 92)), start(1), start(30)).doubled


def test_iterations_that_a_restart_removes_are_not_doubled() -> None:
    """The restart at 40 removes iterations after 91, which was recorded before the fault at 30."""
    observed = seen((9, 101), (12, 91), (29, 120), (29, 120), (12, 91), (41, 92))
    assert not compute(observed, start(1), start(11), start(40), until=30).doubled


def test_next_fault_does_not_count() -> None:
    observed = seen(
        (9, 90), (10.5, 100), (41, 91), states=[(40, {**IDLE, "n1": "down"}, "PENDING")]
    )
    assert compute(observed, start(1), start(40), until=30) == Figures(
        None, "", 0, 1, 0, doubled=False
    )


def test_checkpoint_is_new_since_the_last_start_only(tmp_path: Path) -> None:
    """Each of the older checkpoints may be damaged."""
    training = Training(cast("Nodes", None), "7", "t", tmp_path)
    assert training.new_checkpoints() == []
    for number in (10, 20, 30):
        folder = tmp_path / f"files/checkpoints/iteration-{number:08}"
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    (tmp_path / "job.events").write_text(
        "".join(f"{json.dumps(start(time))}\n" for time in (5, 15))
    )
    assert [path.name[-2:] for path in training.new_checkpoints()] == ["20", "30"]


def test_observations_without_progress_are_counted() -> None:
    """A fault may take long, such as the `up` after a power cut. This time does not count."""
    states = [
        (float(moment), IDLE, "RUNNING" if moment < 4 else "PENDING") for moment in range(1, 11)
    ]
    assert Seen([], states).idle() == 6
    assert Seen([(6.5, 20)], states).idle() == 4
    assert Seen([(6.5, 20)], states, [7.5, 8.5]).idle() == 2
    assert Seen([], states[:3]).idle() == 3


@pytest.mark.parametrize(
    ("states", "end"),
    [
        (["RUNNING", *20 * ["FAILED"]], "FAILED"),
        (["RUNNING", *19 * ["FAILED"]], ""),
        (["RUNNING", *10 * ["FAILED"], "", *10 * ["FAILED"]], "FAILED"),
        ([*10 * ["NODE_FAIL"], *10 * ["FAILED"]], ""),
        (["NODE_FAIL", "PENDING", "RUNNING"], ""),
        (["COMPLETED", "COMPLETED", "", "COMPLETED", "COMPLETED"], "COMPLETED"),
        ([], ""),
    ],
)
def test_job_has_ended_when_its_state_stays(states: list[str], end: str) -> None:
    assert (
        end_of(Seen(states=[(float(time), {}, state) for time, state in enumerate(states)])) == end
    )
