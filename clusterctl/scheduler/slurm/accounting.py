"""What sacct's JSON tells of jobs: whether they have ended, and what their steps used.

Versions of Slurm write it differently, so every value may be missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.scheduler.base import GOING_ON
from clusterctl.util.numbers import finite

_MIB: Final = 1 << 20
# Steps of clusterctl itself and of Slurm, which do not run the program's tasks.
_NO_TASKS: Final = frozenset({"telemetry", "batch", "extern"})


@dataclass(frozen=True, slots=True)
class StepsUse:
    """What the steps of a job used. memory_mib: the most on a node at a time. core_s: the time of
    all cores together. tasks: the most of a step. 0: unknown.
    """

    memory_mib: float = 0.0
    core_s: float = 0.0
    tasks: int = 0


def shows_running_job(accounting: str) -> bool:
    """Return whether a job in sacct's JSON has not ended, or none is there."""
    try:
        jobs = json.loads(accounting)["jobs"]
        return not jobs or any(job["state"]["current"] in GOING_ON for job in jobs)
    except (ValueError, KeyError, TypeError):
        # The JSON is of another version of Slurm.
        return False


def uses_by_job(accounting: str) -> Mapping[str, StepsUse]:
    """Return what the jobs in sacct's JSON used, by the ids of jobs and of arrays' tasks. Empty if
    it can't be read.
    """
    try:
        jobs = json.loads(accounting)["jobs"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return {_id(job): _use_of(job) for job in _dicts(jobs)}


def split_records(accounting: str, ids: Sequence[str]) -> Mapping[str, str]:
    """Return the parts of sacct's JSON about each job, with all its tasks or components, by the jobs'
    IDs. ids: of the jobs that were asked for.

    Raises ValueError if it is not JSON.
    """
    answer = json.loads(accounting)
    if len(ids) == 1:
        return {ids[0]: accounting}
    jobs = _dicts(_at(answer, "jobs"))
    parts: dict[str, list[Mapping[str, Any]]] = {job_id: [] for job_id in ids}
    for job in jobs:
        numbers = (_at(job, "array", "job_id"), _at(job, "het", "job_id"), job.get("job_id"))
        own = (f"{_number(number) or 0:.0f}" for number in numbers)
        if (job_id := next((each for each in own if each in parts), None)) is not None:
            parts[job_id].append(job)
    return {job_id: json.dumps({**answer, "jobs": own}) for job_id, own in parts.items() if own}


def _id(job: Mapping[str, Any]) -> str:
    number = _number(_at(job, "array", "task_id"))
    parent = _number(_at(job, "array", "job_id"))
    if parent and number is not None:
        return f"{parent:.0f}_{number:.0f}"
    return f"{_number(job.get('job_id')) or 0:.0f}"


def _use_of(job: Mapping[str, Any]) -> StepsUse:
    loads: list[tuple[float, float]] = []
    core_s = 0.0
    tasks = 0
    for step in _dicts(job.get("steps")):
        count = _number(_at(step, "tasks", "count")) or 0
        nodes = max(1.0, _number(_at(step, "nodes", "count")) or 1)
        most = _counts(_at(step, "tres", "requested", "max")).get("mem", 0.0)
        begin, end = (_number(_at(step, "time", key)) for key in ("start", "end"))
        mib = most / _MIB * math.ceil(count / nodes)
        if mib and begin and end:
            # Of two steps that follow each other, the first has left its memory.
            loads += [(begin, mib), (max(end, begin + 1), -mib)]
        total = _counts(_at(step, "tres", "requested", "total")).get("cpu", 0.0) / 1e3
        core_s += max(total, _number(_at(step, "time", "total", "seconds")) or 0.0)
        if _at(step, "step", "name") not in _NO_TASKS:
            tasks = max(tasks, int(count))
    load = highest = 0.0
    for _, change in sorted(loads):
        load += change
        highest = max(highest, load)
    return StepsUse(highest, core_s, tasks)


def _counts(listed: Any) -> dict[str, float]:
    """Return the counts of resources in a list of sacct's JSON by their type."""
    return {
        str(each.get("type")): count
        for each in _dicts(listed)
        if (count := _number(each.get("count"))) is not None
    }


def _dicts(listed: Any) -> list[Mapping[str, Any]]:
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float | None:
    """Return a number of sacct's JSON, which versions of Slurm also write as an object."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    number = finite(value)
    return number if number is not None and 0 <= number < 1 << 62 else None
