"""Find, look up and rank collected runs on this machine. Only the file run.json of each run is
read.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from clusterctl.errors import CollectError, UsageError
from clusterctl.scheduler.base import JobState, badness, format_exit
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.spec.metrics import Goal, goal_of
from clusterctl.spec.names import did_you_mean, first_few
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.ledger import (
    RUN_FILE,
    RUNS,
    ledgers,
    readable_runs,
    run_folders,
    runs_folders,
)
from clusterctl.state.run_names import find_run
from clusterctl.state.run_record import Metric, RunRecord, TaskRecord, Value
from clusterctl.util import formatting


@dataclass(frozen=True, repr=False)
class Row:
    """A collected run, or a task of a job array, as a row in lists and tables."""

    run: RunRecord
    task: TaskRecord | None = None

    def __repr__(self) -> str:
        """Return a line such as ``<run demo-12-train: COMPLETED, eval_loss 0.083>``."""
        name = next(metric_names([self]), "")
        last = self.metrics[name].last if name else None
        return (
            f"<run {self.shown}: "
            f"{self.record.state}{'' if last is None else f', {name} {formatting.metric(last, name)}'}>"
        )

    @property
    def number(self) -> str:
        """The task's number in its array; "" if the row is a run."""
        return self.task.number if self.task else ""

    @property
    def folder(self) -> Path:
        return self.run.directory / self.task.folder if self.task else self.run.directory

    @property
    def shown(self) -> str:
        """The name of the run's folder. For a task, the name of the task's folder follows."""
        return (
            f"{self.run.directory.name}/{self.task.folder}"
            if self.task
            else self.run.directory.name
        )

    @property
    def record(self) -> RunRecord | TaskRecord:
        return self.task or self.run

    @property
    def task_records(self) -> Sequence[TaskRecord]:
        """The records of all tasks of an array. For other rows, a single record."""
        return (self.task,) if self.task else self.run.tasks

    @property
    def pauses(self) -> Sequence[tuple[float, float]]:
        """The times between the attempts of a requeued job or task, in Unix seconds."""
        tasks = self.task_records
        attempts = tasks[0].attempts if len(tasks) == 1 else ()
        return [(a.end_time or b.start_time, b.start_time) for a, b in pairwise(attempts)]

    @property
    def config(self) -> Mapping[str, Value]:
        return self.record.config

    @property
    def given_options(self) -> set[str]:
        """The names of the options that the user gave: all, unless the program tells which these
        are.
        """
        return set(self.config if self.record.given is None else self.record.given)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return self.record.metrics

    @property
    def tasks(self) -> Sequence[Row]:
        """A row for each task of an array, also of a packed array; empty for other runs."""
        if self.task is not None:
            return []
        tasks = self.run.tasks if self.run.is_array else self.run.packed
        return [Row(self.run, task) for task in tasks]

    def value(self, key: str) -> Value:
        """Return the value of a field (``state``), a program's option or a metric; None if it has
        no value.

        For a metric, ``KEY`` is the last value, ``KEY.min`` the lowest and ``KEY.max`` the highest.
        ``config.KEY`` and ``metric.KEY`` distinguish an option and a metric of the same name.
        """
        if key in FIELDS:
            return FIELDS[key](self)
        kind, _, rest = key.partition(".")
        if kind == "config":
            return self.config.get(rest)
        if kind == "metric":
            return _metric_value(self.metrics, rest)
        return self.config[key] if key in self.config else _metric_value(self.metrics, key)

    def is_option(self, key: str) -> bool:
        """Return whether ``value`` returns an option that the user gave, no measurement."""
        kind, _, _ = key.partition(".")
        return key not in FIELDS and (kind == "config" or key in self.config)

    def text(self, key: str) -> str:
        """Return the value of ``key`` as text: an option as the user gave it."""
        value = self.value(key)
        if self.is_option(key):
            return formatting.given(value)
        return (self.nonfinite(key) if value is None else None) or as_text(value, key)

    def nonfinite(self, key: str) -> str | None:
        """Return ``nan``, ``inf`` or ``-inf`` if that is the last value of a metric; otherwise
        None.
        """
        metric = self.metrics.get(key) or self.metrics.get(key.removeprefix("metric."))
        if metric is None or metric.last is not None or not metric.nonfinite:
            return None
        return metric.last_nonfinite

    def known_keys(self) -> Iterator[str]:
        """Yield all keys that ``value`` accepts, except ``KEY.min`` and ``KEY.max``."""
        yield from FIELDS
        yield from self.config
        yield from self.metrics


def as_text(value: Value, key: str) -> str:
    """Return a field's or a metric's value as text."""
    kind = KINDS.get(key)
    return formatting.metric(value, key) if kind is None else formatting.shown(value, kind)


def _metric_value(metrics: Mapping[str, Metric], key: str) -> float | None:
    if key in metrics:
        return metrics[key].last
    name, _, bound = key.rpartition(".")
    if bound in {"min", "max"} and name in metrics:
        return metrics[name].min if bound == "min" else metrics[name].max
    return None


def worst_task(tasks: Sequence[TaskRecord]) -> TaskRecord | None:
    """Return the task that has failed first, as ``worst_job`` does. None: there are no tasks."""
    return min(tasks, key=lambda task: badness(JobState.__members__.get(task.state)), default=None)


def _exit(row: Row) -> Value:
    """Return the exit code of the job, or of an array's first failed task, or the name of the
    signal that ended it.
    """
    task = worst_task(row.task_records)
    text = format_exit(task.exit_code, task.signal) if task else ""
    return int(text) if text.isdecimal() else text or None


def _cause(row: Row) -> Value:
    told = Diagnosis.read(row.record.diagnosis)
    return told.told_of_task or None if told else None


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
    "cause": _cause,
    "user": lambda row: row.run.user,
    "cluster": lambda row: row.run.cluster,
    "partition": lambda row: row.run.partition,
    "nodes": lambda row: len(row.record.nodes),
    "tasks_per_node": lambda row: row.run.tasks_per_node,
    "submitted": lambda row: row.run.submit_time,
    "started": lambda row: row.record.start_time,
    "ended": lambda row: row.record.end_time,
    "collected": lambda row: int(row.run.collected_at),
    "elapsed": lambda row: row.record.elapsed_s,
    "node_hours": lambda row: row.record.node_hours or None,
    "gpu_energy": lambda row: row.record.gpu_energy_j,
    "cost": lambda row: row.run.cost_usd,
    "tags": lambda row: ",".join(row.run.tags),
    "note": lambda row: row.run.note,
}
USUAL_METRICS: Final = (
    "eval_loss val_loss loss train_loss eval_accuracy val_accuracy val_acc accuracy".split()
)
# The name of the jobs of a scaling.
_SCALING: Final = re.compile(r".+-scaling-[0-9a-f]{4}")
_MOST_SHOWN: Final = 3
_MOST_KEYS: Final = 40
# Fields in Unix seconds.
TIMES: Final = frozenset({"submitted", "started", "ended", "collected"})
# The fields whose values have a unit, by the words of ``formatting.shown``.
KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(TIMES, "moment"),
    "elapsed": "duration",
    "node_hours": "hours",
    "gpu_energy": "J",
    "cost": "cost",
}


def find_runs(folders: Iterable[Path]) -> tuple[list[RunRecord], list[Path]]:
    """Return the runs in these folders, newest first, and the paths of unreadable runs.

    folders: the folders of runs, or folders that contain them. Raises UsageError if a folder can't
        be read.
    """
    runs: list[RunRecord] = []
    damaged: list[Path] = []
    for path in dict.fromkeys(path for folder in folders for path in run_folders(folder)):
        try:
            runs.append(RunRecord.load(path))
        except CollectError:
            damaged.append(path)
    return sorted(runs, key=lambda run: (submitted_at(run), run.job_id), reverse=True), damaged


def submitted_at(run: RunRecord) -> float:
    """Return when the run was submitted or, if unknown, collected, in Unix seconds."""
    return run.submit_time or run.collected_at


def ordered(rows: Sequence[Row], key: str, *, reverse: bool = False) -> list[Row]:
    """Sort rows by a key's values, lowest first. Rows without a value come last, even with
    ``reverse``.
    """
    with_value = [row for row in rows if row.value(key) is not None]
    without_value = [row for row in rows if row.value(key) is None]
    return (
        sorted(with_value, key=lambda row: _rank(row.value(key)), reverse=reverse) + without_value
    )


@dataclass(frozen=True, slots=True)
class TaskRanking:
    """The tasks of a sweep by a metric, best first. Tasks that did not complete are behind all
    others.

    goal: None if the tasks are sorted by an option or field, of which no value is the best.
    best: the best task that completed and has a value; None if there is none.
    """

    tasks: Sequence[Row]
    metric: str
    goal: Goal | None
    best: Row | None

    def __str__(self) -> str:
        """Return a text such as ``eval_loss, lower is better``."""
        return f"{self.metric}, {self.goal_words}"

    @property
    def goal_words(self) -> str:
        return "lowest first" if self.goal is None else self.goal.words


def ranked(
    run: Row, metric: str | None = None, *, goal: Goal | None = None, reverse: bool = False
) -> TaskRanking:
    """Return the ranking of the tasks of a sweep.

    For a task that was submitted again, the newest run is used. The default metric is defined by
    the sweep, or is a usual metric such as ``val_loss``, or the first whose direction is known.
    goal: whether the metric's lowest or highest value is best. Default: that of the sweep, or by
        the name.
    reverse: list the worst of the tasks that completed first.

    Raises UsageError if there are no tasks, or no metric, or if the metric's direction is not
    known.
    """
    tasks = latest_tasks(run)
    sweep = run.run.sweep or {}
    if not tasks:
        raise UsageError(
            f"{run.shown} is not a job array",
            about="sweep",
            fix="choose a job array from the output of `clusterctl runs`",
        )
    names = [*metric_names(tasks)]
    known_names = (name for name in names if is_usual(name) or goal_of(name) is not None)
    if metric is None:
        metric = sweep.get("metric") or next(known_names, names[0] if names else None)
        metric = metric and key_of(metric, tasks)
    if metric is None:
        raise UsageError(
            f"no task of {run.shown} has a metric",
            code="not-found",
            about="metric",
            why="metrics are read from the metrics.jsonl of each task",
            fix=f"`clusterctl runs show {run.run.full_id}` shows how each task ended",
        )
    if not any(metric_of(metric) in task.metrics for task in tasks):
        reject_unknown_keys(tasks, [metric], as_metrics=True)
    goal = goal or _goal_of(metric, run)
    is_metric = any(metric_of(metric) in task.metrics for task in tasks)
    if goal is None and is_metric:
        raise UsageError(
            f"it is not known whether lower or higher values of {metric!r} are better",
            about="goal",
            fix="add `--goal min` or `--goal max`: `clusterctl runs list --sweep "
            f"{run.run.full_id} --sort {shlex.quote(metric)} --goal min`",
        )
    done = [task for task in tasks if task.record.state == JobState.COMPLETED]
    behind = [task for task in tasks if task.record.state != JobState.COMPLETED]
    best_first = ordered(done, metric, reverse=goal is Goal.MAX)
    is_descending = (goal is Goal.MAX) != reverse
    rows = [
        *ordered(done, metric, reverse=is_descending),
        *ordered(behind, metric, reverse=is_descending),
    ]
    has_best = goal is not None and bool(best_first) and best_first[0].value(metric) is not None
    return TaskRanking(rows, metric, goal, best_first[0] if has_best else None)


def _goal_of(metric: str, run: Row) -> Goal | None:
    """Return which of a metric's values are best: by the definition of the sweep, or by the
    metric's name.
    """
    sweep = run.run.sweep or {}
    if metric_of(metric) == sweep.get("metric") and (goal := sweep.get("goal")) in {*Goal}:
        return Goal(str(goal))
    return goal_of(metric_of(metric))


def key_of(metric: str, rows: Sequence[Row]) -> str:
    """Return the key of a metric, which is not that of a field or an option with the same name."""
    is_taken = metric in FIELDS or metric.startswith(("metric.", "config."))
    is_taken = is_taken or any(metric in row.config for row in rows)
    return f"metric.{metric}" if is_taken else metric


def metric_of(key: str) -> str:
    """Return the name of the metric in a key such as ``metric.loss.min``."""
    return re.sub(r"\.(?:min|max)$", "", key.removeprefix("metric."))


def swept_keys(run: Row) -> list[str]:
    """Return the keys of the options that a sweep varies, which are not those of fields such as
    name.
    """
    keys = (run.run.sweep or {}).get("keys") or []
    return [f"config.{key}" if key in FIELDS else key for key in keys]


def latest_tasks(run: Row) -> list[Row]:
    """Return the newest run of each task of an array (`replay --failed` repeats tasks); [] if no
    array.
    """
    token = run.run.replay_of if run.run.of_failed else run.run.token
    records = {run.run.directory: run.run} | {
        run_again.directory: run_again for run_again in _array_runs(run, str(token))
    }
    latest: dict[str, Row] = {}
    for record in sorted(records.values(), key=submitted_at) if run.tasks else ():
        latest |= {row.number: row for row in Row(record).tasks}
    return list(latest.values())


def failed_tasks(tasks: Iterable[Row]) -> list[Row]:
    """Return the tasks that ended and did not complete: those that `replay --failed` repeats."""
    return [task for task in tasks if task.run.final and task.record.state != JobState.COMPLETED]


def repeat_command(run: Row) -> str:
    """Return the command that repeats the failed tasks of an array, as text for a message."""
    command = f"clusterctl replay {run.run.full_id} --failed"
    return f"`{command}`; after a change of your code add `--code current`"


def _array_runs(run: Row, token: str) -> Iterator[RunRecord]:
    """Yield the collected run of an array (with this token), and the later runs of its failed
    tasks.
    """
    for path in readable_runs((run.run.directory.parent, *runs_folders())):
        with suppress(OSError, CollectError):
            # Searching the bytes is faster than loading every record.
            if token.encode() in (path / RUN_FILE).read_bytes():
                record = RunRecord.load(path)
                if record.token == token or (record.of_failed and record.replay_of == token):
                    yield record


def metric_names(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the names of these runs' metrics: first usual metrics such as ``val_loss``, then the
    rest.
    """
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    usual = sorted(
        filter(is_usual, names), key=lambda name: USUAL_METRICS.index(name.replace("/", "_"))
    )
    yield from dict.fromkeys((*usual, *names))


def is_usual(name: str) -> bool:
    """Return whether a metric is usual, also as ``val/loss``."""
    return name.replace("/", "_") in USUAL_METRICS


def _rank(value: Value) -> tuple[int, float, str]:
    """Return a sort key that puts numbers before texts."""
    if isinstance(value, str):
        return (1, 0.0, value)
    with suppress(OverflowError):
        return (0, float(value or 0), "")
    return (0, math.inf, "")


def reject_unknown_keys(
    rows: Sequence[Row], keys: Iterable[str], *, as_metrics: bool = False
) -> None:
    """Reject (UsageError) keys for which no row has a value. as_metrics: suggest only metrics."""
    for key in keys:
        if key in FIELDS or not rows or any(row.value(key) is not None for row in rows):
            continue
        known_keys = dict.fromkeys(key_of_row for row in rows for key_of_row in row.known_keys())
        # The key exists, but all its values are NaN or null.
        if key in known_keys:
            continue
        if as_metrics:
            known_keys = dict.fromkeys(metric_names(rows))
        suggestion = did_you_mean(key, known_keys)
        if partial := [row for row in rows if row.record.left_out]:
            shown = first_few([row.shown for row in partial], _MOST_SHOWN)
            raise UsageError(
                f"no run has a value for {key!r}",
                code="not-found",
                about="run-key",
                why=f"not all was read: {partial[0].shown}: "
                f"{'; '.join(partial[0].record.left_out)}",
                fix=f"if it is a metric, read it from the files of {shown}",
            )
        known = first_few([*known_keys], _MOST_KEYS)
        fix = f"use {known}, or METRIC.min or METRIC.max"
        if as_metrics:
            fix = f"use {known}" if known else "name runs that have metrics"
        raise UsageError(
            f"no run has a value for {key!r}",
            code="not-found",
            about="run-key",
            fix=suggestion or fix,
        )


def named_run(name: str, chosen: ChosenCluster | None = None, *, certain: bool = False) -> Row:
    """Return the collected run or array task with this name.

    name: the path of the run's folder, the folder's name, or the job id: ``12``, ``demo/12``,
        ``12_3``.
    chosen, certain: as for ``find_run``.

    Raises:
        UsageError: no collected run has the name, or it is not clear which run the name means.
        CollectError: the run.json can't be read.
    """
    named = find_run(name, chosen, certain=certain)
    if named.run_folder is None:
        raise named.not_collected()
    named.reject_other_folder()
    run = RunRecord.load(named.run_folder)
    return _task_of(run, named.task) if named.task else Row(run)


def named_rows(name: str, chosen: ChosenCluster | None = None) -> list[Row]:
    """Return the collected runs of the scaling with this name, the oldest first; or the run with
    this name.

    Raises the errors of ``named_run``.
    """
    if _SCALING.fullmatch(name):
        runs, _ = runs_of_scaling(name, runs_folders())
        # A run may have copies.
        if rows := {
            run.token: Row(run) for run in reversed(runs) if run.scaling and run.name == name
        }:
            return [*rows.values()]
        if any(entry.name == name for jobs in ledgers() for entry in jobs.entries()):
            raise UsageError(
                f"no run of {name} is on this machine",
                code="not-found",
                about="collected-run",
                fix="`clusterctl collect` copies the runs of the jobs that have ended",
            )
    return [named_run(name, chosen)]


def newest_run() -> Row:
    """Return the run in ./runs that was submitted last. UsageError: there is none."""
    runs, _ = find_runs([RUNS] if RUNS.is_dir() else [])
    if not runs:
        raise UsageError(
            "./runs has no run",
            code="not-found",
            about="collected-run",
            fix="`clusterctl collect` copies the runs of the jobs that have ended",
        )
    return Row(runs[0])


def runs_of_scaling(name: str, folders: Iterable[Path]) -> tuple[list[RunRecord], list[Path]]:
    """Return the collected runs of a scaling in these folders, and the paths of its unreadable
    runs.
    """
    return find_runs(path for path in readable_runs(folders) if path.name.endswith(f"-{name}"))


def _task_of(run: RunRecord, number: str) -> Row:
    tasks = Row(run).tasks
    for row in tasks:
        if row.number == number:
            return row
    whole = run.directory.name
    raise UsageError(
        f"job {run.job_id} has no task {number}",
        code="not-found",
        about="task",
        where=str(run.directory),
        why="" if tasks else "the job is not an array",
        fix=f"`clusterctl runs show {whole}` lists the tasks" if tasks else f"use {whole}",
    )
