"""The records of tasks that ran inside a single job."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends.packed import packed_tasks

END = {"node": "n1", "start": 100.2, "end": 103.9}


JOB = JobInfo(number=12, name="x", user="ada", state=JobState.FAILED, reason="")


def written(*lines: Any) -> str:
    return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)


def test_last_end_of_a_task_counts() -> None:
    text = written(
        {"task": 0, "status": 3, **END},
        {"task": 1, "status": -9, **END},
        {"task": 0, "status": 0, **END},
        {"task": 2, "status": 4, **END},
        {"task": 4, "status": 137, **END},
        {"task": 5, "status": -15, **END, "is_cut": True},
    )
    tasks = packed_tasks(text, JOB, range(6))
    assert [(task.id, task.state, task.exit_code, task.signal) for task in tasks] == [
        ("12_0", "COMPLETED", 0, 0),
        ("12_1", "FAILED", None, 9),
        ("12_2", "FAILED", 4, 0),
        ("12_3", "CANCELLED", None, None),
        ("12_4", "FAILED", 137, 0),
        ("12_5", "CANCELLED", None, 15),
    ]
    assert (tasks[0].nodes, tasks[0].elapsed_s, tasks[3].elapsed_s) == (("n1",), 3, None)
    # A job that is started again runs both.
    waiting = packed_tasks(text, replace(JOB, state=JobState.PENDING), [3, 5])
    assert [task.state for task in waiting] == ["PENDING", "PENDING"]


def test_damaged_records_of_a_job_are_passed_over() -> None:
    text = written(
        "[]",
        "null",
        "{",
        {"task": 0, "status": 0, **END, "end": 1e300},
        {"task": 0, "status": -65, **END},
        {"task": 0, "status": 256, **END},
        {"task": "0", "status": 0, **END},
        {"task": 0, "status": 0, **END, "node": 5},
        "x" * 10_000,
        {"task": 1, "status": 0, **END, "end": 50.0},
    )
    tasks = packed_tasks(text, JOB, [0, 1])
    assert [(task.state, task.elapsed_s) for task in tasks] == [
        ("CANCELLED", None),
        ("COMPLETED", 0),
    ]
    assert packed_tasks("", JOB, [0])[0].state == "CANCELLED"
