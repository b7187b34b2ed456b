"""Select and sort collected runs by conditions, and return runs as a data frame."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from clusterctl.errors import MachineError, Notice, UsageError, excluded, printable, unaccompanied
from clusterctl.runs.find import (
    FIELDS,
    TIMES,
    Row,
    find_runs,
    named_run,
    ordered,
    ranked,
    reject_unknown_keys,
    submitted_at,
)
from clusterctl.spec.metrics import Goal
from clusterctl.spec.units import parse_duration_s, parse_slurm_time_s
from clusterctl.state.ledger import RUNS, runs_folders
from clusterctl.state.run_record import Value
from clusterctl.util.progress import SILENT, LineReporter

if TYPE_CHECKING:
    import polars

_CONDITION: Final = re.compile(r"([^=!<>~]+?)\s*(<=|>=|!=|==?|<|>|~)\s*(.*)", re.DOTALL)
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Conditions that runs must meet, and the order of the runs.

    where: conditions such as ``lr>=1e-3``, ``state=FAILED`` or ``name~bert``. A run must meet all
        of them.
    columns: keys to show. At least one run must have each key.
    sort: the key to sort by, lowest first. None: the newest run first.
    since: the maximum time since submission, such as 7d, or the earliest date.
    tags: tags that each run must have.
    tasks: whether each task of an array is a row of its own.
    cluster: the cluster that ran the jobs. None: any cluster.
    """

    where: Sequence[str] = ()
    columns: Sequence[str] = ()
    sort: str | None = None
    reverse: bool = False
    since: str | None = None
    tags: Sequence[str] = ()
    tasks: bool = False
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """The runs of a query, in order.

    searched: all rows before filtering.
    notes: lines for the user about damaged records and the searched folders.
    """

    rows: list[Row]
    searched: list[Row]
    notes: tuple[str, ...]


def select_runs(
    query: RunQuery, folders: Sequence[Path] = (), *, everywhere: bool = False
) -> FoundRuns:
    """Find the runs that meet a query.

    folders: folders to search. Empty: ./runs or, if it does not exist, all folders that `collect`
        wrote to.
    everywhere: search all folders that `collect` wrote to, even if ./runs exists.

    Raises:
        UsageError: a condition is malformed, or no run has the key of a condition or column.
    """
    searched, notes = _folders(folders, everywhere=everywhere)
    runs, damaged = find_runs(searched)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        notes = (*notes, f"note: the run.json of {damaged[0]}{more} can't be read")
    rows = [row for run in map(Row, runs) for row in ((query.tasks and run.tasks) or [run])]
    keys = [*query.columns, *([query.sort] if query.sort is not None else [])]
    _reject_keys_of_tasks(rows, keys)
    reject_unknown_keys(rows, keys)
    if query.cluster is not None:
        rows = [row for row in rows if row.run.cluster == query.cluster]
    selected = _filter(rows, query)
    if query.sort is not None:
        selected = ordered(selected, query.sort, reverse=query.reverse)
    elif query.reverse:
        selected.reverse()
    return FoundRuns(selected, rows, notes)


def _folders(
    requested: Sequence[Path], *, everywhere: bool
) -> tuple[Sequence[Path], tuple[str, ...]]:
    """Return the folders to search, and a note for the user if ./runs does not exist."""
    if requested:
        return requested, ()
    known_folders = runs_folders()
    if everywhere or not known_folders:
        return known_folders, ()
    if RUNS.is_dir():
        return [RUNS], ()
    folders = ", ".join(map(str, known_folders))
    note = f"./runs does not exist; showing the runs in {folders}"
    return known_folders, (Notice("runs-elsewhere", note),)


def _reject_keys_of_tasks(rows: Sequence[Row], keys: Sequence[str]) -> None:
    for key in keys:
        if all(row.value(key) is None for row in rows) and any(
            task.value(key) is not None for row in rows for task in row.tasks
        ):
            raise UsageError(
                f"only tasks of job arrays have a value for {key!r}",
                about="key-of-tasks",
                fix="add --tasks, or select an array with --sweep RUN",
            )


def _filter(rows: Sequence[Row], query: RunQuery) -> list[Row]:
    selected = list(rows)
    if query.since is not None:
        first = parse_since(query.since)
        selected = [row for row in selected if submitted_at(row.run) >= first]
    if query.tags:
        selected = [row for row in selected if set(query.tags) <= set(row.run.tags)]
    for text in query.where:
        match = _CONDITION.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not a valid condition",
                about="condition",
                fix="write a condition such as lr=0.1, loss<2, name~bert or state!=FAILED",
            )
        key, operator, expected = match.groups()
        _reject_keys_of_tasks(rows, [key])
        reject_unknown_keys(rows, [key])
        meets_condition = _condition(key, operator, expected, [row.value(key) for row in rows])
        selected = [row for row in selected if meets_condition(measured(row, key))]
    return selected


def measured(row: Row, key: str) -> Value:
    """Return the value of a key; NaN or infinity if that is the last value of a metric."""
    value = row.value(key)
    text = row.nonfinite(key) if value is None else None
    return value if text is None else float(text)


def _condition(
    key: str, operator: str, text: str, values: Sequence[Value]
) -> Callable[[Value], bool]:
    """Return a function that tells whether a value meets the condition "``key`` ``operator``
    ``text``".

    Upper and lower case are the same. values: the key's values in all rows. UsageError is raised if
        these are all numbers, and ``text`` is not a number, time or duration.
    """
    if operator == "~":
        return lambda value: value is not None and text.lower() in str(value).lower()
    if operator == "!=":
        is_equal = _condition(key, "=", text, values)
        return lambda value: not is_equal(value)
    compare = _OPERATORS[operator]
    expected = _number(key, text)
    if expected is None and values and all(_is_number(value) or value is None for value in values):
        raise UsageError(
            f"the values of {key} are numbers, and {text!r} is not a number",
            about="number",
            fix=f"compare with a number, such as {key}{operator}1",
        )
    if key == "tags" and operator in {"=", "=="}:
        return lambda value: text in str(value).split(",")

    if isinstance(expected, float) and math.isnan(expected):
        return lambda value: (
            operator in {"=", "=="} and isinstance(value, float) and math.isnan(value)
        )

    def holds(value: Value) -> bool:
        if _is_number(value):
            return expected is not None and compare(value, expected)
        return value is not None and compare(str(value).lower(), text.lower())

    return holds


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(key: str, text: str) -> int | float | None:
    """Parse a number, a time (to Unix seconds) or a duration (to seconds). Return None for other
    texts.
    """
    kinds: list[Callable[[str], int | float]] = [int, float]
    if key == "elapsed":
        kinds.append(parse_slurm_time_s)
    elif key in TIMES:
        kinds.append(lambda date: datetime.fromisoformat(date).timestamp())
    for kind in kinds:
        with suppress(ValueError):
            return kind(text)
    return None


def parse_since(text: str) -> float:
    """Return the time that `--since` means, in Unix seconds. Raises UsageError."""
    with suppress(ValueError):
        return time.time() - parse_duration_s(text)
    with suppress(ValueError):
        # A time without a zone is in the user's zone.
        return datetime.fromisoformat(text).timestamp()
    raise UsageError(
        f"--since: {text!r} is not a time",
        about="time",
        fix="use 7d, 12h, or a date such as 2026-01-31",
    )


def list_runs(
    where: str | Sequence[str] = (),
    *,
    sort: str | None = None,
    reverse: bool = False,
    since: str | None = None,
    tags: str | Sequence[str] = (),
    sweep: str | Row | None = None,
    goal: Literal["min", "max"] | None = None,
    tasks: bool = False,
    folders: str | Path | Sequence[str | Path] = (),
    everywhere: bool = False,
    cluster: str | None = None,
    report: LineReporter = SILENT.note,
) -> list[Row]:
    """Return collected runs, newest first, like `runs list`; or the tasks of ``sweep``, best first.

    where: conditions such as ``lr>1e-4``; all must hold. sort: the key to sort by. reverse: the
        other order.
    since: only runs of this time, such as ``7d``. tags: only runs with these tags. cluster: only
        its runs.
    sweep: a run, or its name. Its tasks are ranked by its own metric, or by ``sort``. Tasks that
        did not complete come last.
    goal: with ``sweep``, whether the metric's lowest or highest value is best. Default: by its
        name, if the name tells.
    tasks: an array has a row for each task. report: called with lines about damaged runs.
    folders: the folders to search. Empty: ./runs. everywhere: search all folders of runs on this
        machine.
    """
    if sweep is not None:
        if where or since or tags or tasks or folders or everywhere or cluster:
            raise excluded("sweep=", "a condition on runs")
        run = sweep if isinstance(sweep, Row) else named_run(sweep)
        return [*ranked(run, sort, goal=Goal(goal) if goal else None, reverse=reverse).tasks]
    if goal is not None:
        raise unaccompanied("goal=", "sweep=")
    query = RunQuery(
        where=[where] if isinstance(where, str) else where,
        sort=sort,
        reverse=reverse,
        since=since,
        tags=[tags] if isinstance(tags, str) else tags,
        tasks=tasks,
        cluster=cluster,
    )
    paths = [folders] if isinstance(folders, str | Path) else folders
    selected = select_runs(query, [*map(Path, paths)], everywhere=everywhere)
    for note in selected.notes:
        report(printable(note))
    return selected.rows


_LARGEST: Final = 2**63
# Polars types of fields. Other fields are texts.
_TYPES: Final = {
    "nodes": "Int64",
    "tasks_per_node": "Int64",
    "elapsed": "Int64",
    "node_hours": "Float64",
    "gpu_energy": "Float64",
    "cost": "Float64",
    "final": "Boolean",
}


def frame(rows: Iterable[Row]) -> polars.DataFrame:
    """Return runs as a data frame. The columns are those of `runs list`, program options, and
    metrics.

    Columns in which the runs differ come first: the run, options, metrics, and other fields.
    For a metric, ``KEY`` is the last value, ``KEY.min`` the lowest, ``KEY.max`` the highest. An
    option with the name of a column is ``config.KEY``; a metric with the name of a column or option
    is ``metric.KEY``. Times are in UTC. Raises MachineError if Polars is not installed.
    """
    try:
        import polars
    except ImportError as exc:
        raise MachineError(
            "data frames need Polars, which is not installed here",
            code="tool-missing",
            about="polars",
            why=str(exc),
            fix="pip install 'clusterctl[frame]'",
        ) from exc
    columns = []
    rows = [*rows]
    for name, key in _columns(rows).items():
        values = [row.value(key) for row in rows]
        shown = [_as_number(value) for value in values]
        dtype = None
        if name in TIMES:
            shown = [_time(value) for value in values]
            dtype = polars.Datetime("us", "UTC")
        elif name in FIELDS:
            dtype = getattr(polars, _TYPES.get(name, "String"))
        columns.append(polars.Series(name, shown, dtype=dtype, strict=False))
    return polars.DataFrame(columns)


def _columns(rows: Sequence[Row]) -> Mapping[str, str]:
    """Return the key of each column; first those in which the runs differ."""
    options = dict.fromkeys(key for row in rows for key in row.config)
    metrics = dict.fromkeys(key for row in rows for key in row.metrics)
    keys = {"run": "run"}
    for key in options:
        keys.setdefault(f"config.{key}" if key in FIELDS else key, f"config.{key}")
    for key in metrics:
        name = f"metric.{key}" if key in FIELDS or key in options else key
        for suffix in ("", ".min", ".max"):
            keys.setdefault(name + suffix, f"metric.{key}{suffix}")
    keys |= {name: name for name in FIELDS}
    varies = {
        name: len({repr(measured(row, key)) for row in rows}) > 1 for name, key in keys.items()
    }
    return {name: keys[name] for name in sorted(keys, key=lambda name: not varies[name])}


def all_columns(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the head and the rows of a table with the columns of ``frame``, as ``cells`` are."""
    keys = _columns(rows)
    return [*keys], cells(rows, [*keys.values()])


def cells(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Any]]:
    """Return the values of these keys for each row, with all digits. Times are in UTC; a metric's
    last value may be NaN or infinite.
    """
    return [
        [_time(row.value(key)) if key in TIMES else measured(row, key) for key in keys]
        for row in rows
    ]


def _as_number(value: Value) -> Any:
    """Return the value; an integer above 64 bits as a float, or None if it is too large for a
    float.
    """
    if not isinstance(value, int) or -_LARGEST <= value < _LARGEST:
        return value
    with suppress(OverflowError):
        return float(value)
    return None


def _time(value: Value) -> datetime | None:
    """Convert Unix seconds to a time in UTC; None for an invalid time, which a damaged record may
    hold.
    """
    with suppress(OverflowError, ValueError, OSError):
        return None if value is None else datetime.fromtimestamp(int(value), UTC)
    return None
