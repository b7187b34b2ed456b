"""Collected runs as a data frame of Polars, which the extra ``frame`` installs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import MachineError
from clusterctl.runs.find import FIELDS, TIMES, Row
from clusterctl.state.ledger import Value

if TYPE_CHECKING:
    import polars

_LARGEST: Final = 2**63
_NUMBERS: Final = {"nodes": int, "elapsed": int, "cost": float, "final": bool}  # other fields are texts


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
    found = list(rows)
    types = {bool: polars.Boolean, int: polars.Int64, float: polars.Float64, str: polars.String}
    columns = []
    for name, values in _columns(found).items():
        if name in TIMES:
            dtype: Any = polars.Datetime("us", "UTC")
            columns.append(polars.Series(name, [_time(value) for value in values], dtype=dtype))
            continue
        kind = _NUMBERS.get(name, str) if name in FIELDS else _kind(values)
        columns.append(polars.Series(name, [_as(kind, value) for value in values], dtype=types[kind]))
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


def _kind(values: Iterable[Value]) -> type:
    """What a column is of: of numbers, if all that are there are; else of texts."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int} and all(value is None or _as(int, value) is not None for value in values):
        return int
    if kinds and kinds <= {int, float}:
        return float
    return bool if kinds == {bool} else str


def _as(kind: type, value: Value) -> Value:
    """The value as one of its column's kind; None of a number that is too large for it."""
    if value is None or kind is bool:
        return value
    if kind is str:
        return str(value)
    if kind is int:
        return int(value) if -_LARGEST <= int(value) < _LARGEST else None
    try:
        return float(value)
    except OverflowError:
        return None


def _time(value: Value) -> datetime | None:
    """None for a time that no calendar has, which a damaged record may hold."""
    with suppress(OverflowError, ValueError, OSError):
        return None if value is None else datetime.fromtimestamp(int(value), UTC)
    return None
