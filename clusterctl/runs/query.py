"""Which collected runs a user means: conditions that they meet, their order; and the runs as a data frame."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import MachineError, Notice, UsageError
from clusterctl.runs.find import FIELDS, TIMES, Row, find_runs, ordered, reject_unknown_keys, submitted_at
from clusterctl.spec.units import parse_duration_s, parse_slurm_time_s
from clusterctl.state.ledger import Value, runs_folders
from clusterctl.state.submissions import RUNS

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
    """Which runs are wanted, and in which order.

    where: conditions such as ``lr>=1e-3``, ``state=FAILED``, ``name~bert``, which all hold.
    columns: keys that at least one run must have.
    sort: the key to sort by, lowest first. None: the newest first.
    since: how long ago the runs were submitted at most, such as 7d, or a date.
    tags: tags that each run has.
    tasks: whether each task of an array is a row of its own.
    cluster: the cluster that ran them. None: any.
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

    searched: all rows that were looked through.
    notes: lines for the user, about damaged records and the folders that were searched.
    """

    rows: list[Row]
    searched: list[Row]
    notes: tuple[str, ...]


def select_runs(query: RunQuery, folders: Sequence[Path] = (), *, everywhere: bool = False) -> FoundRuns:
    """Find the runs that meet a query.

    folders: where to look. Empty: in ./runs, or if there is none, in all folders that `collect` wrote to.
    everywhere: look in all of these, though there is ./runs.

    Raises:
        UsageError: a condition can't be understood, or no run has its key, or one of the columns.
    """
    searched, notes = _folders(folders, everywhere=everywhere)
    runs, damaged = find_runs(searched)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        notes = (*notes, f"note: the run.json of {damaged[0]}{more} can't be read")
    rows = [row for run in map(Row, runs) for row in ((query.tasks and run.tasks) or [run])]
    keys = [*query.columns, *([query.sort] if query.sort is not None else [])]
    if not query.tasks:
        _reject_keys_of_tasks(rows, keys)
    reject_unknown_keys(rows, keys)
    if query.cluster is not None:
        rows = [row for row in rows if row.run.cluster == query.cluster]
    found = _filtered(rows, query)
    if query.sort is not None:
        found = ordered(found, query.sort, reverse=query.reverse)
    elif query.reverse:
        found.reverse()
    return FoundRuns(found, rows, notes)


def _folders(named: Sequence[Path], *, everywhere: bool) -> tuple[Sequence[Path], tuple[str, ...]]:
    """Return the folders to look in, and a note if they are others than a user may expect."""
    if named:
        return named, ()
    known = runs_folders()
    if everywhere or not known:
        return known, ()
    if RUNS.is_dir():
        return [RUNS], ()
    folders = ", ".join(map(str, known))
    return known, (Notice("runs-elsewhere", f"no ./runs here: these are the runs in {folders}"),)


def _reject_keys_of_tasks(rows: Sequence[Row], keys: Sequence[str]) -> None:
    """Reject a key of which only the tasks of arrays have a value."""
    for key in keys:
        if all(row.value(key) is None for row in rows) and any(
            task.value(key) is not None for row in rows for task in row.tasks
        ):
            raise UsageError(
                f"only tasks of arrays have {key!r}",
                code="key-of-tasks-only",
                fix="add --tasks, or name an array: --sweep RUN",
            )


def _filtered(rows: Sequence[Row], query: RunQuery) -> list[Row]:
    found = list(rows)
    if query.since is not None:
        first = _since(query.since)
        found = [row for row in found if submitted_at(row.run) >= first]
    if query.tags:
        found = [row for row in found if set(query.tags) <= set(row.run.tags)]
    for text in query.where:
        match = _CONDITION.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is no condition",
                code="not-a-condition",
                fix="write it as lr=0.1, loss<2, name~bert, state!=FAILED",
            )
        key, operator, wanted = match.groups()
        reject_unknown_keys(rows, [key])
        holds = _condition(key, operator, wanted, [row.value(key) for row in rows])
        found = [row for row in found if holds(row.value(key))]
    return found


def _condition(key: str, operator: str, text: str, values: Sequence[Value]) -> Callable[[Value], bool]:
    """Whether a value meets the condition; of numbers, times and spans of time as such, of texts in any case.

    Raises:
        UsageError: the key's values are numbers, and the text is none.
    """
    if operator == "~":
        return lambda value: value is not None and text.lower() in str(value).lower()
    if operator == "!=":
        same = _condition(key, "=", text, values)
        return lambda value: not same(value)
    compare, wanted = _OPERATORS[operator], _number(key, text)
    if wanted is None and values and all(_is_number(value) or value is None for value in values):
        raise UsageError(
            f"{key} is a number, and {text!r} is none",
            code="not-a-number",
            fix=f"write it as {key}{operator}1",
        )
    if key == "tags" and operator in {"=", "=="}:
        return lambda value: text in str(value).split(",")

    def holds(value: Value) -> bool:
        if _is_number(value):
            return wanted is not None and compare(value, wanted)
        return value is not None and compare(str(value).lower(), text.lower())

    return holds


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(key: str, text: str) -> int | float | None:
    """The number that a text is, of a time its Unix seconds, of a span of time its seconds; None if none."""
    kinds: list[Callable[[str], int | float]] = [int, float]
    if key == "elapsed":
        kinds.append(parse_slurm_time_s)
    elif key in TIMES:
        kinds.append(lambda one: datetime.fromisoformat(one).timestamp())
    for kind in kinds:
        with suppress(ValueError):
            return kind(text)
    return None


def _since(text: str) -> float:
    with suppress(ValueError):
        return time.time() - parse_duration_s(text)
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()  # without a zone, the user's own
    raise UsageError(
        f"--since: {text!r} is no time", code="not-a-time", fix="say 7d, 12h, or a date: 2026-01-31"
    )


_LARGEST: Final = 2**63
_TYPES: Final = {"nodes": "Int64", "elapsed": "Int64", "cost": "Float64", "final": "Boolean"}  # else text


def frame(rows: Iterable[Row]) -> polars.DataFrame:
    """A row for each run: the columns of `runs list`, the options of the program, the metrics.

    Of a metric, ``KEY`` is the last value, ``KEY.min`` and ``KEY.max`` are the lowest and highest. An option
    that is called as a field is ``config.KEY``, a metric that is called as either ``metric.KEY``. Times are
    in UTC.

    Raises:
        MachineError: Polars is not installed.
    """
    try:
        import polars  # noqa: PLC0415 - few have it, and need it
    except ImportError as exc:
        raise MachineError(
            "data frames need Polars, which is not installed here",
            code="polars-missing",
            why=str(exc),
            fix="pip install 'clusterctl[frame]'",
        ) from exc
    columns = []
    for name, values in _columns(list(rows)).items():
        shown, dtype = [_as_number(value) for value in values], None
        if name in TIMES:
            shown, dtype = [_time(value) for value in values], polars.Datetime("us", "UTC")
        elif name in FIELDS:
            dtype = getattr(polars, _TYPES.get(name, "String"))
        columns.append(polars.Series(name, shown, dtype=dtype, strict=False))
    return polars.DataFrame(columns)


def _columns(rows: Sequence[Row]) -> Mapping[str, list[Value]]:
    """The values of each column, by its name: a key means what it means to ``Row.value``."""
    options = dict.fromkeys(key for row in rows for key in row.config)
    metrics = dict.fromkeys(key for row in rows for key in row.metrics)
    keys = {name: name for name in FIELDS}  # column -> how ``Row.value`` calls it
    for key in options:
        keys.setdefault(f"config.{key}" if key in FIELDS else key, f"config.{key}")
    for key in metrics:
        name = f"metric.{key}" if key in FIELDS or key in options else key
        for end in ("", ".min", ".max"):
            keys.setdefault(name + end, f"metric.{key}{end}")
    return {name: [row.value(key) for row in rows] for name, key in keys.items()}


def _as_number(value: Value) -> Any:
    """The value, but of a whole number of more than 64 bits the float; None if it is too large for that."""
    if not isinstance(value, int) or -_LARGEST <= value < _LARGEST:
        return value
    with suppress(OverflowError):
        return float(value)
    return None


def _time(value: Value) -> datetime | None:
    """None for a time that no calendar has, which a damaged record may hold."""
    with suppress(OverflowError, ValueError, OSError):
        return None if value is None else datetime.fromtimestamp(int(value), UTC)
    return None
