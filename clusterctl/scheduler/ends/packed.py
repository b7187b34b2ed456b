"""The tasks that ran inside a single job (`submit --pack`), from packed.jsonl in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.state.attempts import AttemptRecord
from clusterctl.util.typed_json import from_json

_LATEST: Final = 1 << 40  # Unix seconds
_MOST_CODE: Final = 255
_MOST_SIGNAL: Final = 64


@dataclass(frozen=True, slots=True)
class _End:
    """A line of packed.jsonl (payload/node/pack.py): a task has ended. status: its exit code, or -N if
    signal N ended it. Times: Unix seconds.

    is_cut: whether the task ended because the job was ended.
    """

    task: int
    status: int
    node: str
    start: float
    end: float
    is_cut: bool = False

    @property
    def is_plausible(self) -> bool:
        times = (0 <= time <= _LATEST for time in (self.start, self.end))
        return -_MOST_SIGNAL <= self.status <= _MOST_CODE and all(times)


def packed_tasks(text: str, job: JobInfo, numbers: Iterable[int]) -> tuple[JobInfo, ...]:
    """Return each task of a packed job, by its last end. text: of packed.jsonl."""
    ends = {end.task: end for end in _ends(text)}
    waiting = JobState.CANCELLED if job.ended else JobState.PENDING
    whole = JobInfo(
        number=job.number,
        name=job.name,
        user=job.user,
        state=waiting,
        reason="",
        work_dir=job.work_dir,
        comment=job.comment,
        prefix=job.prefix,
        submit_time=job.submit_time,
    )
    return tuple(
        replace(whole, task=number, **_facts(ends.get(number), waiting)) for number in numbers
    )


def _ends(text: str) -> Iterator[_End]:
    """Yield the records in a file that a job may have damaged."""
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            end = from_json(_End, json.loads(line))
            if end.is_plausible:
                yield end


def _facts(end: _End | None, waiting: JobState) -> Mapping[str, Any]:
    if end is None:
        return {}
    signal = max(0, -end.status)
    not_done = waiting if end.is_cut else JobState.FAILED
    attempt = AttemptRecord(
        start_time=int(end.start),
        end_time=int(max(end.start, end.end)),
        nodes=(end.node,),
    )
    return {
        "state": not_done if end.status else JobState.COMPLETED,
        "exit_code": None if signal else end.status,
        "signal": signal,
        "nodes": attempt.nodes,
        "start_time": attempt.start_time,
        "end_time": attempt.end_time,
        "attempts": (attempt,),
    }
