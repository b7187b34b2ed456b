"""The record of a collected run, run.json, and the folders that have runs.

Later versions read run.json, so unknown keys are tolerated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from clusterctl.errors import CollectError, MachineError
from clusterctl.state.submissions import RUN_FILE, RUNS, UNCHANGED
from clusterctl.state.workspace import state_home
from clusterctl.util.disk import append_line, read_rows

_FOLDERS = "runs.jsonl"  # beside the workspaces


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)  # most verbs read none


@dataclass(slots=True)
class Metric:
    """One metric of a run: its last, lowest and highest value, each with its step if the program tells steps.

    ``last`` is None where the last value is NaN or infinite; ``nonfinite`` counts those.
    """

    last: float | None = None
    last_step: int | None = None
    min: float | None = None
    min_step: int | None = None
    max: float | None = None
    max_step: int | None = None
    count: int = 0
    nonfinite: int = 0

    def add(self, value: float, step: int | None = None) -> None:
        """Take up one more value."""
        self.count += 1
        self.last_step = step
        if not math.isfinite(value):
            self.last = None
            self.nonfinite += 1
            return
        self.last = value
        if self.min is None or value < self.min:
            self.min, self.min_step = value, step
        if self.max is None or value > self.max:
            self.max, self.max_step = value, step


Value = str | int | Annotated[float, Field(allow_inf_nan=False)] | bool | None
Time = Annotated[int, Field(ge=0, le=1 << 40)]  # Unix seconds


class SweepRecord(TypedDict, total=False):
    """What a sweep varies, and the metric and the goal (min, max) that rank its tasks."""

    version: int
    keys: list[str]
    metric: str | None
    goal: str | None


class TaskRecord(_Stored):
    """How a job, or one task of an array, ended. Times are Unix seconds."""

    id: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    nodes: tuple[str, ...] = ()
    start_time: Time | None = None
    end_time: Time | None = None
    config: dict[str, Value] = {}
    metrics: dict[str, Metric] = {}

    @property
    def number(self) -> str:
        """Its number in the array; "" of a job that is none."""
        return self.id.partition("_")[2]

    @property
    def folder(self) -> str:
        """Its folder in that of the array's job."""
        return f"task-{self.number}"


def node_hours(tasks: Iterable[TaskRecord]) -> float:
    """Whole nodes times hours, also where a task had part of a node; one that never started had none."""
    times = ((task.start_time, task.end_time, len(task.nodes)) for task in tasks)
    return sum(count * (end - start) for start, end, count in times if start and end) / 3600


class Skipped(_Stored):
    """Something in the job's folder that was left there, and why. ``path`` is printable.

    ``files`` is how many files that is, of ``bytes`` in all; none if it holds no data, such as a link.
    """

    path: str
    reason: str
    bytes: int = 0
    files: int = 1

    @property
    def only_there(self) -> bool:
        """Whether it holds data that is nowhere else."""
        return self.files > 0 and self.reason != UNCHANGED


class RunRecord(_Stored):
    """A collected run: the folder ``directory`` and what run.json in it says.

    ``token`` tells it from a job of the same number on a cluster that had the same name before.
    ``state`` is Slurm's word; with an array, that of the worst task. ``final`` is False for a snapshot of a
    job that was still going on. ``diagnosis`` says why it failed or was cancelled. ``source`` is the hash of
    what the job was given, as in source.json. Times are Unix seconds; ``elapsed_s`` goes from the first
    start to the last end. ``price_per_hour`` is a node's, in USD; ``cost_usd`` is that for all nodes of all
    tasks. None where it is not known. ``args`` are the program's, ``config`` has its options and what its
    metrics.jsonl says of its configuration; of an array, each task has its own ``config`` and ``metrics``.
    ``tags`` and ``note`` are the user's words. Of a sweep, ``sweep`` has its keys and what ranks its tasks.
    Of a replay, ``replay_of`` is the token of the original run; ``of_failed`` says that its tasks are those
    of the original that had not completed, in whose place they are ranked.
    """

    version: int = 1
    token: str
    cluster: str
    scheduler: str = "slurm"
    job_id: str
    name: str
    user: str
    partition: str
    account: str
    state: str
    final: bool
    tasks: tuple[TaskRecord, ...]
    nodes: tuple[str, ...]
    submit_time: Time | None
    start_time: Time | None
    end_time: Time | None
    elapsed_s: int | None
    price_per_hour: float | None = None
    cost_usd: float | None = None
    collected_at: float
    remote_dir: str
    files: int
    bytes: int
    source: str | None = None
    diagnosis: dict[str, Any] | None = None
    args: tuple[str, ...] = ()
    config: dict[str, Value] = {}
    metrics: dict[str, Metric] = {}
    tags: tuple[str, ...] = ()
    note: str | None = None
    sweep: SweepRecord | None = None
    replay_of: str | None = None
    of_failed: bool = False
    skipped: tuple[Skipped, ...] = ()
    directory: Path = Path()

    @property
    def is_array(self) -> bool:
        return any(task.number for task in self.tasks)

    @classmethod
    def load(cls, directory: Path) -> RunRecord:
        """Read the record of a run's folder; CollectError if there is none, or it is not one."""
        path = directory / RUN_FILE
        try:
            return cls.model_validate_json(path.read_bytes()).model_copy(update={"directory": directory})
        except (OSError, ValueError) as exc:
            what = f"{directory} is not a collected run"
            why = str(exc).partition("\n")[0]
            fix = "name a folder that `clusterctl collect` made"
            raise CollectError(what, code="not-a-run", where=str(path), why=why, fix=fix) from exc

    def as_json(self) -> str:
        """The content of run.json; where the folder lies is not part of it."""
        return self.model_dump_json(indent=2, exclude={"directory"}) + "\n"


def runs_folders() -> tuple[Path, ...]:
    """./runs, and all other folders on this machine that ``collect`` has brought runs to, if they exist."""
    noted = [row.get("folder") for row in read_rows(state_home() / _FOLDERS)]
    paths = (RUNS.absolute(), *(Path(one) for one in noted if isinstance(one, str) and one.startswith("/")))
    return tuple(dict.fromkeys(path for path in paths if os.path.isdir(path)))  # noqa: PTH112 - no error


def note_runs_folder(folder: Path) -> None:
    """Remember a folder with runs; a full disk is no reason not to have collected."""
    path = state_home() / _FOLDERS
    if all(row.get("folder") != str(folder) for row in read_rows(path)):
        with suppress(MachineError):
            append_line(path, json.dumps({"folder": str(folder)}))
