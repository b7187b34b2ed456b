"""Results of the bundled jobs that measure, as tables, and as charts by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any, Final

from clusterctl.errors import printable
from clusterctl.runs.charts import (
    MOST_CHARTS,
    MOST_LINES,
    finite_values,
    line_chart,
)
from clusterctl.runs.page import Chart, Section, Series, Table
from clusterctl.runs.spread import mean_of
from clusterctl.util import formatting

_MOST_RESULTS: Final = 64
_MOST_KINDS: Final = 8
_MOST_COLUMNS: Final = 16
_MOST_TEXT: Final = 100
_HIDDEN: Final = frozenset({"kind", "time"})
# The results of checks of sums.
_CHECKS: Final = frozenset({"ok", "wrong", "wrong_rows"})


@dataclass(frozen=True, slots=True)
class _BySize:
    """The chart of a kind of results by size.

    sizes: keys of the size, their geometric mean. variant: the key of the values that a run's chart
        compares.
    """

    title: str
    result: str
    sizes: Sequence[str]
    x: str
    variant: str = ""


_BY_SIZE: Final = {
    "allreduce": _BySize(
        "allreduce: bus bandwidth by size", "bus_gb_per_s", ["bytes"], "size in bytes", "comm"
    ),
    "gemm": _BySize(
        "Matrix products: speed by size", "gflops", [*"mkn"], "geometric mean of m, k, n", "dtype"
    ),
    "micro_batch": _BySize("Speed by micro-batch", "samples_per_s", ["size"], "micro-batch"),
}


def results_section(lines: Iterable[Mapping[str, Any]]) -> Section:
    """Return tables of results of the bundled jobs. Of many lines of a kind, the last are shown.

    If all results were checked and right, a sentence says so instead of columns. The kind that the
    program wrote last is first, as `train --find` writes its result after its trials.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(printable(str(line.get("kind", "")))[:_MOST_TEXT], []).append(line)
    checked = [listed for listed in kinds.values() if any("ok" in line for line in listed)]
    are_right = bool(checked) and all(
        line.get("ok") is True for listed in checked for line in listed
    )
    tables = []
    for kind, listed in reversed([*kinds.items()][:_MOST_KINDS]):
        last = listed[-_MOST_RESULTS:]
        keys = dict.fromkeys(
            key for line in last for key, value in line.items() if value is not None
        )
        columns = [key for key in keys if key not in (_HIDDEN | _CHECKS if are_right else _HIDDEN)]
        columns = columns[:_MOST_COLUMNS]
        cells = [[_measured(line.get(key), key) for key in columns] for line in last]
        head = [printable(key)[:_MOST_TEXT] for key in columns]
        if head:
            title = kind.replace("_", " ") if len(kinds) > 1 else ""
            tables.append(Table(head, cells, title))
    return Section("Results", ["all results are right"] if are_right else [], tables=tables)


def _measured(value: Any, key: str) -> str:
    """Return a measurement as text. A list has a value for each rank."""
    if isinstance(value, list):
        entries = [
            str(entry) if isinstance(entry, list) else _measured(entry, key) for entry in value
        ]
        return printable(", ".join(entries))[:_MOST_TEXT]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (isinstance(value, float) or formatting.unit_of(key)):
        return formatting.quantity(value, formatting.unit_of(key))
    return formatting.given(value if isinstance(value, bool | None) else printable(str(value)))[
        :_MOST_TEXT
    ]


def size_charts(rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[Chart]:
    """Return charts of the results of `allreduce`, `gemm` and `train --find` by size.

    rows: title of a run -> its lines of results. Each transport or type of numbers is a line in the
    chart of a single run. In a comparison, each has a chart with a line per run.
    """
    lines: dict[tuple[str, str], list[Series]] = defaultdict(list)
    for number, (title, results) in enumerate(rows.items()):
        for at, ((kind, variant), points) in enumerate(_by_size(results).items()):
            if len(rows) > 1:
                lines[kind, variant].append(Series(title, points, number))
            else:
                lines[kind, ""].append(Series(variant, points, at))
    charts = []
    for (kind, variant), listed in lines.items():
        if len(rows) == 1 and all(len(line.points) == 1 for line in listed):
            continue
        by = _BY_SIZE[kind]
        title = f"{by.title}, {variant}" if variant else by.title
        unit = formatting.unit_of(by.result)
        chart = line_chart(title, listed[:MOST_LINES], by.x, unit)
        charts.append(replace(chart, x_log=True, x_bytes=by.sizes == ["bytes"], has_points=True))
    return charts[:MOST_CHARTS]


def _by_size(
    results: Iterable[Mapping[str, Any]],
) -> Mapping[tuple[str, str], list[tuple[float, float]]]:
    """Return (size, result) points by kind and variant. Of a list with a value per rank, take the
    mean.
    """
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in results:
        kind = line.get("kind")
        if not isinstance(kind, str) or kind not in _BY_SIZE:
            continue
        by = _BY_SIZE[kind]
        listed = line.get(by.result)
        values = listed if isinstance(listed, list) else [listed]
        figures = finite_values(values)
        sizes = finite_values(line.get(key) for key in by.sizes)
        if (
            figures
            and len(figures) == len(values)
            and len(sizes) == len(by.sizes)
            and min(sizes) >= 1
        ):
            curves[kind, str(line.get(by.variant, ""))].append(
                (round(geometric_mean(sizes), 3), mean_of(figures))
            )
    return curves
