"""Charts of the results of `allreduce`, `gemm` and `train --find` by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean
from typing import Any, Final

from clusterctl.runs.charts import MOST_CHARTS, MOST_LINES, finite_values, line_chart, unit_of
from clusterctl.runs.page import Chart, Series


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


def size_charts(rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[Chart]:
    """Return charts of the results of `allreduce`, `gemm` and `train --find` by size.

    rows: title of a run -> its lines of results. Each transport or type of numbers is a line in the chart of
    a single run. In a comparison, each has a chart with a line per run.
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
        title, unit = f"{by.title}, {variant}" if variant else by.title, unit_of(by.result)
        chart = line_chart(title, listed[:MOST_LINES], by.x, unit)
        charts.append(replace(chart, x_log=True, x_bytes=by.sizes == ["bytes"], has_points=True))
    return charts[:MOST_CHARTS]


def _by_size(results: Iterable[Mapping[str, Any]]) -> Mapping[tuple[str, str], list[tuple[float, float]]]:
    """Return (size, result) points by kind and variant. Of a list with a value per rank, take the mean."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in results:
        kind = line.get("kind")
        if not isinstance(kind, str) or kind not in _BY_SIZE:
            continue
        by = _BY_SIZE[kind]
        listed = line.get(by.result)
        values = listed if isinstance(listed, list) else [listed]
        figures, sizes = finite_values(values), finite_values(line.get(key) for key in by.sizes)
        if figures and len(figures) == len(values) and len(sizes) == len(by.sizes) and min(sizes) >= 1:
            curves[kind, str(line.get(by.variant, ""))].append(
                (round(geometric_mean(sizes), 3), fmean(figures))
            )
    return curves
