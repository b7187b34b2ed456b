"""Which of the tasks of a packed job run, how often, and how many at a time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from payload.node import pack
from payload.node.pack import PackTasks, numbers_in, slots_of
from tests.support.clocks import replace_clock


def run_all(tasks: PackTasks, failing: dict[int, int]) -> list[int]:
    """Run tasks one by one, and return them in order. failing: task -> how often it still fails."""
    order = []
    while (number := tasks.next()) is not None:
        order.append(number)
        fails = failing.get(number, 0) > 0
        failing[number] = failing.get(number, 0) - 1
        tasks.end(number, 3 if fails else 0)
    tasks.give_up()
    return order


@pytest.mark.parametrize(
    ("failing", "order", "failed"),
    [
        ({}, [0, 1, 2], []),
        # A failed task runs again after all others.
        ({0: 1}, [0, 1, 2, 0], []),
        ({0: 9, 1: 1}, [0, 1, 2, 0, 1], [0]),
        # If none succeeds, the program is wrong.
        ({0: 9, 1: 9, 2: 9}, [0, 1, 2], [0, 1, 2]),
    ],
)
def test_failed_tasks_run_once_more_unless_all_fail(
    tmp_path: Path, failing: dict[int, int], order: list[int], failed: list[int]
) -> None:
    tasks = PackTasks([0, 1, 2], str(tmp_path / "packed.jsonl"))
    assert run_all(tasks, failing) == order
    assert tasks.failed == failed


def test_tasks_that_succeeded_in_an_earlier_attempt_do_not_run_again(tmp_path: Path) -> None:
    records = tmp_path / "packed.jsonl"
    lines = [
        {"task": 0, "status": 0},
        {"task": 1, "status": 137},
        {"task": 2, "status": 1},
        {"task": 2, "status": 0},
        {"task": "x", "status": 0},
        {},
    ]
    records.write_text("\n".join(map(json.dumps, lines)) + '\n{"task": 3, "sta')
    tasks = PackTasks([0, 1, 2, 3], str(records))
    assert run_all(tasks, {}) == [1, 3]
    assert tasks.succeeded == {0, 1, 2, 3}


def test_task_that_the_end_of_the_job_has_cut_did_not_fail(tmp_path: Path) -> None:
    records = tmp_path / "packed.jsonl"
    tasks = PackTasks([0, 1], str(records))
    tasks.end(0, 143, is_cut=True)
    tasks.end(1, 0, is_cut=True)
    assert tasks.failures == {}
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert lines == [{"task": 0, "status": 143, "is_cut": True}, {"task": 1, "status": 0}]
    assert run_all(PackTasks([0, 1], str(records)), {}) == [0]


@pytest.mark.parametrize(
    ("options", "variables", "slots"),
    [
        ({}, {"SLURM_TASKS_PER_NODE": "4(x2),1"}, {"a": 4, "b": 4, "c": 1}),
        (
            {"fit": ""},
            {"SLURM_JOB_CPUS_PER_NODE": "16(x2),6", "SLURM_CPUS_PER_TASK": "4"},
            {"a": 4, "b": 4, "c": 1},
        ),
        # A task that needs more CPUs than a node has runs alone.
        (
            {"fit": ""},
            {"SLURM_JOB_CPUS_PER_NODE": "2(x3)", "SLURM_CPUS_PER_TASK": "4"},
            dict.fromkeys("abc", 1),
        ),
    ],
)
def test_slots_of_a_node_follow_slurms_variables(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    variables: dict[str, str],
    slots: dict[str, int],
) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert slots_of(options, ["a", "b", "c"]) == slots


def test_tasks_of_a_node_that_is_silent_for_long_start_again_on_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x2)")
    told = io.BytesIO()
    monkeypatch.setattr(pack, "subprocess", Mock(Popen=lambda *_, **__: Mock(stdin=told)))
    now = 0.0
    replace_clock(monkeypatch, pack, monotonic=lambda: now)
    job = pack.Pack({"tasks": "0-2"}, [])
    for line in ("0: on a", "1: on b"):
        job._take(line)
    job._start_tasks()
    while now <= pack.SILENT_S:
        now += pack.STOPPED_S / 2
        job._take("0: alive")
        job._forget_silent_nodes()
    for number in (0, 1):
        job._take(f"0: end {number} 0 1 2")
        job._start_tasks()
    assert told.getvalue().decode().split("\n") == ["0 0 0", "1 1 0", "0 1 0", "0 2 0", ""]


def test_numbers_in_a_list_of_tasks() -> None:
    assert numbers_in("0-3,7,9-10") == [0, 1, 2, 3, 7, 9, 10]
