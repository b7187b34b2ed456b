"""Collected runs on this machine: found in folders, named, filtered and sorted, by their run.json alone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import CollectError, UsageError
from clusterctl.spec.base import did_you_mean, parse_duration_s
from clusterctl.spec.sweep import Goal, goal_of
from clusterctl.state.ledger import RUN_FILE, Metric, RunRecord, TaskRecord, runs_folders

Value = str | int | float | bool | None

_CONDITION: Final = re.compile(r"([^=!<>~]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*)", re.DOTALL)
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_TASK: Final = "task-"  # the folder of an array's task, with its number
_JOB: Final = re.compile(r"(?:(?P<cluster>[a-z][a-z0-9-]*)/)?(?P<job>[A-Za-z]?\d+)(?:_(?P<task>\d+))?")


@dataclass(frozen=True)
class Row:
    """A run, or one task of an array: what is listed, filtered and compared as one."""

    run: RunRecord
    task: TaskRecord | None = None

    @property
    def number(self) -> str:
        """The task's number in its array, "" of a whole run."""
        return self.task.id.rpartition("_")[2] if self.task else ""

    @property
    def folder(self) -> Path:
        return self.run.directory / f"{_TASK}{self.number}" if self.task else self.run.directory

    @property
    def shown(self) -> str:
        """How a user names it: its folder's name, with the task's."""
        return f"{self.run.directory.name}/{_TASK}{self.number}" if self.task else self.run.directory.name

    @cached_property
    def config(self) -> Mapping[str, Value]:
        return self.task.config if self.task else self.run.config

    @cached_property
    def metrics(self) -> Mapping[str, Metric]:
        return self.task.metrics if self.task else self.run.metrics

    @property
    def tasks(self) -> Sequence[Row]:
        """The tasks of an array, a row for each; none of another run."""
        array = self.task is None and any("_" in one.id for one in self.run.tasks)
        return [Row(self.run, one) for one in self.run.tasks] if array else []

    def value(self, key: str) -> Value:
        """The value of a field, an option of its configuration or a metric; None if it has none.

        ``KEY.min`` and ``KEY.max`` are the lowest and highest value of a metric, ``KEY`` is its last;
        ``config.KEY`` and ``metric.KEY`` tell those apart that have one name.
        """
        if key in FIELDS:
            return FIELDS[key](self)
        kind, _, rest = key.partition(".")
        if kind == "config":
            return self.config.get(rest)
        if kind == "metric":
            return _of_metric(self.metrics, rest)
        return self.config[key] if key in self.config else _of_metric(self.metrics, key)

    def keys(self) -> Iterator[str]:
        """All keys that have a value, but for ``KEY.min`` and ``KEY.max``."""
        yield from FIELDS
        yield from self.config
        yield from self.metrics


def _of_metric(metrics: Mapping[str, Metric], key: str) -> float | None:
    if key in metrics:
        return metrics[key].last
    name, _, which = key.rpartition(".")
    if which in {"min", "max"} and name in metrics:
        return metrics[name].min if which == "min" else metrics[name].max
    return None


def _state(row: Row) -> str:
    return row.task.state if row.task else row.run.state


def _exit(row: Row) -> int | None:
    tasks = (row.task,) if row.task else row.run.tasks
    return next((one.exit_code for one in tasks if one.exit_code), tasks[0].exit_code if tasks else None)


def _start(row: Row) -> int | None:
    return row.task.start_time if row.task else row.run.start_time


def _end(row: Row) -> int | None:
    return row.task.end_time if row.task else row.run.end_time


def _elapsed(row: Row) -> int | None:
    start, end = _start(row), _end(row)
    return end - start if start is not None and end is not None else None


FIELDS: Final[Mapping[str, Callable[[Row], Value]]] = {
    "run": lambda row: row.shown,
    "job": lambda row: row.task.id if row.task else row.run.job_id,
    "name": lambda row: row.run.name,
    "state": _state,
    "exit": _exit,
    "user": lambda row: row.run.user,
    "cluster": lambda row: row.run.cluster,
    "partition": lambda row: row.run.partition,
    "nodes": lambda row: len(row.task.nodes if row.task else row.run.nodes),
    "submitted": lambda row: row.run.submit_time,
    "started": _start,
    "ended": _end,
    "elapsed": _elapsed,
    "cost": lambda row: row.run.cost_usd,
    "tags": lambda row: ",".join(row.run.tags),
    "note": lambda row: row.run.note,
}
TELLING: Final = "eval_loss val_loss loss train_loss eval_accuracy val_accuracy val_acc accuracy".split()
TIMES: Final = frozenset({"submitted", "started", "ended"})  # Unix seconds


def find_runs(folders: Iterable[Path]) -> tuple[list[RunRecord], list[Path]]:
    """The runs in these folders, or that are these folders, newest first; and those that can't be read.

    Raises:
        UsageError: a folder can't be read.
    """
    found: dict[Path, RunRecord] = {}
    damaged: list[Path] = []
    for folder in folders:
        for path in _run_folders(folder):
            try:
                found[path] = RunRecord.load(path)
            except CollectError:
                damaged.append(path)
    return sorted(found.values(), key=_age, reverse=True), damaged


def _age(run: RunRecord) -> tuple[float, str]:
    return run.submit_time or run.collected_at, run.job_id


def _run_folders(folder: Path) -> Iterator[Path]:
    folder = folder.absolute()
    try:
        if (folder / RUN_FILE).is_file():
            yield folder
            return
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if not one.name.startswith(".")]
        yield from (folder / name for name in names if (folder / name / RUN_FILE).is_file())
    except OSError as exc:
        raise UsageError(
            "the folder of runs can't be read",
            where=str(folder),
            why=exc.strerror or str(exc),
            fix="name a folder that `clusterctl collect` made",
        ) from exc


def filtered(
    rows: Sequence[Row], conditions: Sequence[str], *, since: str | None = None, tags: Sequence[str] = ()
) -> list[Row]:
    """The rows that meet all conditions, such as ``lr>=1e-3``, ``state=FAILED``, ``name~bert``.

    ``since`` is how long ago they were submitted at most, such as 7d, or a date; they have all ``tags``.

    Raises:
        UsageError: a condition can't be understood, or no run has its key.
    """
    found = list(rows)
    if since is not None:
        first = _since(since)
        found = [row for row in found if (row.run.submit_time or row.run.collected_at) >= first]
    if tags:
        found = [row for row in found if set(tags) <= set(row.run.tags)]
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{text!r} is no condition", fix="write it as lr=0.1, loss<2, name~bert, state!=FAILED"
            )
        key, operator, wanted = match.groups()
        reject_unknown_keys(rows, [key])
        found = [row for row in found if _holds(row.value(key), operator, wanted)]
    return found


def _holds(value: Value, operator: str, wanted: str) -> bool:
    if operator == "!=":
        return not _holds(value, "=", wanted)
    if value is None:
        return False
    if operator == "~":
        return wanted.lower() in str(value).lower()
    if isinstance(value, bool | str):
        return _OPERATORS[operator](str(value).lower(), wanted.lower())
    try:
        return _OPERATORS[operator](value, float(wanted))
    except ValueError:
        return False


def _since(text: str) -> float:
    with suppress(ValueError):
        return time.time() - parse_duration_s(text)
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()  # without a zone, the user's own
    raise UsageError(f"--since: {text!r} is no time", fix="say 7d, 12h, or a date: 2026-01-31")


def ordered(rows: Sequence[Row], key: str, *, reverse: bool = False) -> list[Row]:
    """The rows by the value of a key, lowest first; those without a value come last, also in ``reverse``.

    Raises:
        UsageError: no run has the key.
    """
    reject_unknown_keys(rows, [key])
    having = [(value, row) for row in rows if (value := row.value(key)) is not None]
    having.sort(key=lambda pair: _rank(pair[0]), reverse=reverse)
    return [row for _, row in having] + [row for row in rows if row.value(key) is None]


def ranked(run: Row, metric: str | None = None) -> tuple[list[Row], str]:
    """The tasks of a sweep, the best first, and the metric that ranks them, by default the sweep's own.

    Raises:
        UsageError: it is no array, none of its tasks has the metric, or any at all.
    """
    tasks, sweep = run.tasks, run.run.sweep or {}
    if not tasks:
        raise UsageError(f"{run.shown} is no sweep", fix="`clusterctl runs` lists the runs")
    metric = metric or sweep.get("metric") or next(telling_metrics(tasks), None)
    if metric is None:
        raise UsageError(
            f"no task of {run.shown} has a metric",
            why="a task has those in its metrics.jsonl",
            fix=f"`clusterctl runs show {run.run.job_id}` shows how each ended",
        )
    said = sweep.get("goal") if metric == sweep.get("metric") else None
    return ordered(tasks, metric, reverse=(said or goal_of(metric)) == Goal.MAX), metric


def telling_metrics(rows: Sequence[Row]) -> Iterator[str]:
    """The metrics of these runs, those first that mostly tell how good a run is."""
    found = dict.fromkeys(name for row in rows for name in row.metrics)
    yield from (name for name in TELLING if name in found)
    yield from (name for name in found if name not in TELLING)


def _rank(value: Value) -> tuple[int, float, str]:
    """Numbers before texts, which are not comparable."""
    return (1, 0.0, value) if isinstance(value, str) else (0, float(value or 0), "")


def reject_unknown_keys(rows: Sequence[Row], keys: Iterable[str]) -> None:
    """
    Raises:
        UsageError: none of the rows has such a key.
    """
    for key in keys:
        if key in FIELDS or not rows or any(row.value(key) is not None for row in rows):
            continue
        known = dict.fromkeys(one for row in rows for one in row.keys())  # noqa: SIM118 - no mapping
        if key in known:  # all its values are NaN or null
            continue
        near = did_you_mean(key, known)
        raise UsageError(
            f"no run has {key!r}",
            fix=near or f"known are {', '.join(known)}; and of a metric its .min and .max",
        )


def named_run(name: str, folders: Sequence[Path] = ()) -> Row:
    """The run, or task of an array, that a user names: a folder, its name in ``folders``, or a job's id.

    Raises:
        UsageError: there is none of the name, or several have the job's id.
        CollectError: its run.json can't be read.
    """
    folders = folders or runs_folders()
    for path in (Path(name), *(folder / name for folder in folders)):
        if name and path.is_dir() and (row := _at(path)):
            return row
    match = _JOB.fullmatch(name)
    found = [
        run
        for run in (find_runs(folder for folder in folders if folder.is_dir())[0] if match else [])
        if match and run.job_id == match["job"] and match["cluster"] in {None, run.cluster}
    ]
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} runs have the job id {name}",
            why=", ".join(str(run.directory) for run in found[:5]),
            fix="name the folder of one",
        )
    if not found or match is None:
        raise UsageError(
            f"there is no collected run {name!r}",
            why=f"looked in {', '.join(map(str, folders)) or 'no folder'}",
            fix="`clusterctl runs` lists them; name one by its folder, its folder's name or its job's id",
        )
    (run,) = found
    return _task_of(run, match["task"]) if match["task"] else Row(run)


def _at(path: Path) -> Row | None:
    """The run whose folder this is, or the task; None if it is neither."""
    path = path.absolute()
    if (path / RUN_FILE).is_file():
        return Row(RunRecord.load(path))
    if path.name.startswith(_TASK) and (path.parent / RUN_FILE).is_file():
        return _task_of(RunRecord.load(path.parent), path.name.removeprefix(_TASK))
    return None


def _task_of(run: RunRecord, number: str) -> Row:
    for row in Row(run).tasks:
        if row.number == number:
            return row
    raise UsageError(f"job {run.job_id} has no task {number}", where=str(run.directory))
