"""Collected runs on this machine: found in folders, named, filtered and sorted, by their run.json alone."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import CollectError, UsageError
from clusterctl.scheduler.base import shown_exit
from clusterctl.spec.names import did_you_mean
from clusterctl.spec.sweep import Goal, goal_of
from clusterctl.state.ledger import Metric, RunRecord, TaskRecord, Value, runs_folders
from clusterctl.state.submissions import RUN_FILE

_JOB: Final = re.compile(r"(?:(?P<cluster>[a-z][a-z0-9-]*)/)?(?P<job>[A-Za-z]?\d+)(?:_(?P<task>\d+))?")


@dataclass(frozen=True)
class Row:
    """A run, or one task of an array: what is listed, filtered and compared as one."""

    run: RunRecord
    task: TaskRecord | None = None

    @property
    def number(self) -> str:
        """The task's number in its array, "" of a whole run."""
        return self.task.number if self.task else ""

    @property
    def folder(self) -> Path:
        return self.run.directory / self.task.folder if self.task else self.run.directory

    @property
    def shown(self) -> str:
        """How a user names it: its folder's name, with the task's."""
        return f"{self.run.directory.name}/{self.task.folder}" if self.task else self.run.directory.name

    @property
    def record(self) -> RunRecord | TaskRecord:
        """What has its state, times, nodes, configuration and metrics."""
        return self.task or self.run

    @property
    def config(self) -> Mapping[str, Value]:
        return self.record.config

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return self.record.metrics

    @property
    def tasks(self) -> Sequence[Row]:
        """The tasks of an array, a row for each; none of another run."""
        whole = self.task is None and self.run.is_array
        return [Row(self.run, one) for one in self.run.tasks] if whole else []

    def value(self, key: str) -> Value:
        """The value of a field, an option of its configuration or a metric; None if it has none.

        ``KEY.min`` and ``KEY.max`` are the lowest and highest value of a metric, ``KEY`` is its last;
        of an option and a metric of one name, ``config.KEY`` and ``metric.KEY`` say which is meant.
        """
        if key in FIELDS:
            return FIELDS[key](self)
        kind, _, rest = key.partition(".")
        if kind == "config":
            return self.config.get(rest)
        if kind == "metric":
            return _of_metric(self.metrics, rest)
        return self.config[key] if key in self.config else _of_metric(self.metrics, key)

    def known_keys(self) -> Iterator[str]:
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


def _exit(row: Row) -> Value:
    """The exit code, or the signal's name; of an array that of the first task that failed."""
    tasks = (row.task,) if row.task else row.run.tasks
    failed = (one for one in tasks if one.exit_code or one.signal)
    one = next(failed, tasks[0] if tasks else None)
    text = shown_exit(one.exit_code, one.signal) if one else ""
    return int(text) if text.isdecimal() else text or None


def _elapsed(row: Row) -> int | None:
    start, end = row.record.start_time, row.record.end_time
    return end - start if start is not None and end is not None and end >= start else None


def _job(row: Row) -> Value:
    number = row.task.id if row.task else row.run.job_id
    return int(number) if number.isdecimal() else number


FIELDS: Final[Mapping[str, Callable[[Row], Value]]] = {
    "run": lambda row: row.shown,
    "job": _job,
    "name": lambda row: row.run.name,
    "state": lambda row: row.record.state,
    "final": lambda row: row.run.final,
    "exit": _exit,
    "user": lambda row: row.run.user,
    "cluster": lambda row: row.run.cluster,
    "partition": lambda row: row.run.partition,
    "nodes": lambda row: len(row.record.nodes),
    "submitted": lambda row: row.run.submit_time,
    "started": lambda row: row.record.start_time,
    "ended": lambda row: row.record.end_time,
    "collected": lambda row: int(row.run.collected_at),
    "elapsed": _elapsed,
    "cost": lambda row: row.run.cost_usd,
    "tags": lambda row: ",".join(row.run.tags),
    "note": lambda row: row.run.note,
}
USUAL_METRICS: Final = (
    "eval_loss val_loss loss train_loss eval_accuracy val_accuracy val_acc accuracy".split()
)
TIMES: Final = frozenset({"submitted", "started", "ended", "collected"})  # Unix seconds


def find_runs(folders: Iterable[Path]) -> tuple[list[RunRecord], list[Path]]:
    """The runs in these folders, or that are these folders, newest first; and those that can't be read.

    Raises:
        UsageError: a folder can't be read.
    """
    found: list[RunRecord] = []
    damaged: list[Path] = []
    for path in dict.fromkeys(path for folder in folders for path in _run_folders(folder)):
        try:
            found.append(RunRecord.load(path))
        except CollectError:
            damaged.append(path)
    return sorted(found, key=lambda run: (submitted_at(run), run.job_id), reverse=True), damaged


def submitted_at(run: RunRecord) -> float:
    """When it was submitted; where that is not known, when it was collected. Unix seconds."""
    return run.submit_time or run.collected_at


def _run_folders(folder: Path) -> Iterator[Path]:
    """The folders in this one, or itself, that have a run.json, or can't be looked into."""
    folder = Path(os.path.realpath(folder))
    if _may_be_run(folder):
        yield folder
        return
    try:
        with os.scandir(folder) as entries:
            found = [one for one in entries if not one.name.startswith(".") and one.is_dir()]
    except OSError as exc:
        raise UsageError(
            "the folder of runs can't be read",
            code="file-unreadable",
            where=str(folder),
            why=exc.strerror or str(exc),
            fix="name a folder that `clusterctl collect` made",
        ) from exc
    for one in found:
        if _may_be_run(one.path):
            yield Path(os.path.realpath(one.path) if one.is_symlink() else one.path)


def _may_be_run(folder: Path | str) -> bool:
    try:
        return stat.S_ISREG(os.stat(f"{folder}/{RUN_FILE}").st_mode)  # noqa: PTH116 - of thousands
    except PermissionError:
        return True  # which is told of
    except OSError:
        return False


def ordered(rows: Sequence[Row], key: str, *, reverse: bool = False) -> list[Row]:
    """The rows by the value of a key, lowest first; those without a value come last, also in ``reverse``."""
    having = [row for row in rows if row.value(key) is not None]
    lacking = [row for row in rows if row.value(key) is None]
    return sorted(having, key=lambda row: _rank(row.value(key)), reverse=reverse) + lacking


def ranked(run: Row, metric: str | None = None) -> tuple[list[Row], str]:
    """The tasks of a sweep, the best first, and the metric that ranks them, by default the sweep's own.

    A task that was run again has the place of the one that had failed.

    Raises:
        UsageError: it is no array, none of its tasks has the metric, or any at all.
    """
    tasks, sweep = latest_tasks(run), run.run.sweep or {}
    if not tasks:
        raise UsageError(
            f"{run.shown} is no sweep", code="not-a-sweep", fix="`clusterctl runs` lists the runs"
        )
    metric = metric or sweep.get("metric") or next(metric_names(tasks), None)
    if metric is None:
        raise UsageError(
            f"no task of {run.shown} has a metric",
            code="sweep-without-metric",
            why="a task has those in its metrics.jsonl",
            fix=f"`clusterctl runs show {run.run.job_id}` shows how each ended",
        )
    reject_unknown_keys(tasks, [metric])
    said = sweep.get("goal") if metric == sweep.get("metric") else None
    return ordered(tasks, metric, reverse=(said or goal_of(metric)) == Goal.MAX), metric


def latest_tasks(run: Row) -> list[Row]:
    """The tasks of an array; of those that `replay --failed` ran again, the last. None of another run."""
    token = run.run.replay_of if run.run.of_failed else run.run.token
    found = {run.run.directory: run.run, **{one.directory: one for one in _of_array(run, str(token))}}
    latest: dict[str, Row] = {}
    for one in sorted(found.values(), key=submitted_at) if run.tasks else ():
        latest |= {row.number: row for row in Row(one).tasks}
    return list(latest.values())


def _of_array(run: Row, token: str) -> Iterator[RunRecord]:
    """The runs of an array that are here: the original, and those of its failed tasks."""
    folders = dict.fromkeys((run.run.directory.parent, *runs_folders()))
    for path in dict.fromkeys(path for folder in folders for path in _run_folders(folder)):
        with suppress(OSError, CollectError):
            if token.encode() in (path / RUN_FILE).read_bytes():  # quicker than to load each
                one = RunRecord.load(path)
                if one.token == token or (one.of_failed and one.replay_of == token):
                    yield one


def metric_names(rows: Sequence[Row]) -> Iterator[str]:
    """The metrics of these runs, those first that mostly tell how good a run is."""
    found = dict.fromkeys(name for row in rows for name in row.metrics)
    yield from (name for name in USUAL_METRICS if name in found)
    yield from (name for name in found if name not in USUAL_METRICS)


def _rank(value: Value) -> tuple[int, float, str]:
    """Numbers before texts, which are not comparable."""
    if isinstance(value, str):
        return (1, 0.0, value)
    with suppress(OverflowError):
        return (0, float(value or 0), "")
    return (0, math.inf, "")


def reject_unknown_keys(rows: Sequence[Row], keys: Iterable[str]) -> None:
    """
    Raises:
        UsageError: none of the rows has such a key.
    """
    for key in keys:
        if key in FIELDS or not rows or any(row.value(key) is not None for row in rows):
            continue
        known = dict.fromkeys(one for row in rows for one in row.known_keys())
        if key in known:  # all its values are NaN or null
            continue
        near = did_you_mean(key, known)
        raise UsageError(
            f"no run has {key!r}",
            code="unknown-run-key",
            fix=near or f"known are {', '.join(known)}; and of a metric its .min and .max",
        )


def named_run(name: str) -> Row:
    """The run, or task of an array, that a user names: a folder, its name, or a job's id.

    Raises:
        UsageError: there is none of the name, or several have the job's id.
        CollectError: its run.json can't be read.
    """
    folders = runs_folders()
    for path in (Path(name), *(folder / name for folder in folders)):
        if name and os.path.isdir(path) and (row := _at(path)):  # noqa: PTH112 - any name
            return row
    match = _JOB.fullmatch(name)
    known = find_runs(folders)[0] if match else []
    found = [run for run in known if match and _is_job(run, match)]
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} runs have the job id {name}",
            code="run-ambiguous",
            why=", ".join(str(run.directory) for run in found[:5]),
            fix="name the folder of one",
        )
    if not found or match is None:
        raise UsageError(
            f"there is no collected run {name!r}",
            code="unknown-run",
            why=f"looked in {', '.join(map(str, folders)) or 'no folder'}",
            fix="`clusterctl runs` lists them; name one by its folder, its folder's name or its job's id",
        )
    (run,) = found
    return _task_of(run, match["task"]) if match["task"] else Row(run)


def _is_job(run: RunRecord, named: re.Match[str]) -> bool:
    return run.job_id == named["job"] and named["cluster"] in {None, run.cluster}


def _at(path: Path) -> Row | None:
    """The run whose folder this is, or the task; None if it is neither."""
    path = Path(os.path.realpath(path))
    if _may_be_run(path):
        return Row(RunRecord.load(path))
    if path.name.startswith("task-") and _may_be_run(path.parent):
        return _task_of(RunRecord.load(path.parent), path.name.removeprefix("task-"))
    return None


def _task_of(run: RunRecord, number: str) -> Row:
    for row in Row(run).tasks:
        if row.number == number:
            return row
    raise UsageError(f"job {run.job_id} has no task {number}", code="unknown-task", where=str(run.directory))
