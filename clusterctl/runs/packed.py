"""The tasks that ran inside a single job (`submit --pack`), from packed.jsonl in its run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.ends.failed_rank import signal_of
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.run_record import TaskRecord

# The job's program writes it (payload/node/pack.py).
_RECORDS: Final = "packed.jsonl"
_LONGEST: Final = 1 << 12


class _End(BaseModel):
    """A line of packed.jsonl: a task has ended. status: as in a shell. Times: Unix seconds.

    is_cut: whether the task ended because the job was ended.
    """

    model_config = ConfigDict(strict=True)

    task: int
    status: Annotated[int, Field(ge=0, le=255)]
    node: str
    start: Annotated[float, Field(ge=0, le=1 << 40)]
    end: Annotated[float, Field(ge=0, le=1 << 40)]
    is_cut: bool = False


def packed_tasks(
    tree: Path, job_id: str, numbers: Iterable[int], *, has_ended: bool
) -> tuple[TaskRecord, ...]:
    """Return a record for each task of a packed job, by its last end.

    tree: the folder of the run. has_ended: whether the job has, so that other tasks do not run any
        more.
    """
    ends = {end.task: end for end in _ends(tree / _RECORDS)}
    waiting = JobState.CANCELLED if has_ended else JobState.PENDING
    return tuple(
        TaskRecord(id=f"{job_id}_{number}", **_facts(ends.get(number), waiting))
        for number in numbers
    )


def _ends(path: Path) -> Iterator[_End]:
    """Yield the records in a file that a job may have damaged."""
    with suppress(OSError), path.open("rb") as file:
        while line := file.readline(_LONGEST):
            with suppress(ValidationError):
                yield _End.model_validate_json(line)


def _facts(end: _End | None, waiting: JobState) -> Mapping[str, Any]:
    if end is None:
        return {"state": waiting.value}
    signal = signal_of(end.status)
    not_done = waiting if end.is_cut else JobState.FAILED
    attempt = AttemptRecord(
        start_time=int(end.start),
        end_time=int(max(end.start, end.end)),
        nodes=(end.node,),
    )
    return {
        "state": (not_done if end.status else JobState.COMPLETED).value,
        "exit_code": None if signal else end.status,
        "signal": signal,
        "nodes": attempt.nodes,
        "start_time": attempt.start_time,
        "end_time": attempt.end_time,
        "attempts": (attempt,),
    }
