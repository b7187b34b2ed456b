"""Charts of the results of `allreduce`, `gemm` and `train --find` by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Final

from clusterctl.runs.charts import MOST_CHARTS, MOST_LINES, finite_values, line_chart, unit_of
from clusterctl.runs.find import Row
from clusterctl.runs.page import Chart, Series
from clusterctl.runs.series import result_lines


@dataclass(frozen=True, slots=True)
class _BySize:
    """The chart of a kind of results by size.

    sizes: keys of the size, which is their geometric mean. variant: the key of what is compared in a run.
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


def size_charts(rows: Mapping[str, Row]) -> list[Chart]:
    """Return charts of the results of `allreduce`, `gemm` and `train --find` by size.

    rows: title of a run -> run. Each transport or type of numbers is a line in the chart of a single run. In
    a comparison, each has a chart with a line per run.
    """
    lines: dict[tuple[str, str], list[Series]] = defaultdict(list)
    for number, (title, row) in enumerate([*rows.items()][:MOST_LINES]):
        for at, ((kind, variant), points) in enumerate(_by_size(row).items()):
            if len(rows) > 1:
                lines[kind, variant].append(Series(title, points, number))
            else:
                lines[kind, ""].append(Series(variant, points, at))
    charts = []
    for (kind, variant), listed in lines.items():
        if len(rows) == 1 and all(len(line.points) == 1 for line in listed):
            continue
        by = _BY_SIZE[kind]
        title, unit = f"{by.title}, {variant}" if variant else by.title, unit_of(by.result)
        chart = line_chart(title, listed[:MOST_LINES], by.x, unit)
        charts.append(replace(chart, x_log=True, x_bytes=by.sizes == ["bytes"], has_points=True))
    return charts[:MOST_CHARTS]


def _by_size(row: Row) -> Mapping[tuple[str, str], list[tuple[float, float]]]:
    """Return (size, result) points by kind and variant. Of a list with a value per rank, take the mean."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in result_lines(row.folder):
        kind = line.get("kind")
        if not isinstance(kind, str) or kind not in _BY_SIZE:
            continue
        by = _BY_SIZE[kind]
        listed = line.get(by.result)
        values = listed if isinstance(listed, list) else [listed]
        results, sizes = finite_values(values), finite_values(line.get(key) for key in by.sizes)
        if results and len(results) == len(values) and len(sizes) == len(by.sizes) and min(sizes) >= 1:
            curves[kind, str(line.get(by.variant, ""))].append(
                (round(geometric_mean(sizes), 3), fmean(results))
            )
    return curves
