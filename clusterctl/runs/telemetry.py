"""Charts of the nodes' telemetry during a run, and detection of a slow node (straggler)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from clusterctl.runs.charts import CLOCK_S, ProgramMetrics, line_chart, loss_lines
from clusterctl.runs.curve import Column, Curve
from clusterctl.runs.find import Row
from clusterctl.runs.metric_files import Block
from clusterctl.runs.page import Chart, Section, Series
from clusterctl.runs.table import stored
from clusterctl.runs.telemetry_files import (
    BEFORE,
    BY_COUNTERS,
    FIGURES,
    GPUS,
    OTHER_GPUS,
    TIME,
    NodeFile,
    Parts,
)
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_MOST_NODES: Final = 16
# A straggler takes this much longer than the median of the other ranks, and is the slowest so often
# that the probability for an equally fast node would be below `_BY_CHANCE`.
_SLOWER: Final = 1.2
_BY_CHANCE: Final = 1e-4


def nodes_section(row: Row, metrics: ProgramMetrics, missing: list[str]) -> Section:
    """Return charts over the time of the job: of the loss, and of each figure with a line per node,
    unless that has a single sample. ``missing``: gets messages.
    """
    record = row.record
    nodes = row.record.nodes[:_MOST_NODES]
    start = record.start_time or -math.inf
    end = record.end_time or math.inf
    samples = {
        node: _NodeSamples.of(row.folder, node, start - CLOCK_S, end + CLOCK_S) for node in nodes
    }
    times = [time for each in samples.values() for time in each.ends]
    times += [time for time in (metrics.began, metrics.ended) if time is not None]
    start = record.start_time or min(times, default=0.0)
    end = max([record.end_time or 0.0, *times])
    missing += [text for each in samples.values() for text in each.left_out]
    if silent_nodes := [node for node, each in samples.items() if not each.count]:
        missing.append(f"the telemetry of {', '.join(silent_nodes)}")
    if other_nodes := [node for node, each in samples.items() if each.count and not each.ends]:
        missing.append(
            f"samples at the time of the job: compare the clocks of {', '.join(other_nodes)}"
        )
    if len(record.nodes) > len(nodes):
        missing.append(f"in the charts, {counted(len(record.nodes) - len(nodes), 'more node')}")
    charts = []
    for figure in (each for each in FIGURES if each.in_charts):
        lines = [
            Series(node, each.curves[figure.title].points(), at)
            for at, (node, each) in enumerate(samples.items())
            if figure.title in each.curves
        ]
        if any(len(line.points) > 1 for line in lines):
            charts.append(_time_chart(figure.title, lines, figure.unit, row, (start, end)))
    if charts and (losses := loss_lines(metrics)):
        charts.insert(0, _time_chart("Loss over time", losses, "", row, (start, end)))
    return Section("Nodes", charts=charts)


def _time_chart(
    title: str, lines: Sequence[Series], unit: str, row: Row, span: tuple[float, float]
) -> Chart:
    """Return a chart of lines by Unix time, over the span of the job, with gaps between its
    attempts.
    """
    gaps = [((begin + end) / 2, math.nan) for begin, end in row.pauses]
    # A node's clock can be a little behind that of Slurm.
    placed = [
        [(max(0.0, time - span[0]), value) for time, value in (*line.points, *gaps)]
        for line in lines
    ]
    drawn = [replace(line, points=points) for line, points in zip(lines, placed, strict=True)]
    return line_chart(title, drawn, "s", unit, x_end=span[1] - span[0])


def node_use(
    folder: Path, nodes: Sequence[str], span: tuple[float, float] | None = None
) -> dict[str, float]:
    """Return figures of the nodes: means over all samples of nodes, or of their GPUs, and the most
    memory of a node. Time without samples does not count, nor does a mean over time that is partly
    outside the span. Figures of GPUs are left out if some may be those of other jobs.

    span: the first and the last moment, in Unix seconds. None: the whole job.
    """
    start, end = span or (-math.inf, math.inf)
    samples = [_NodeSamples.of(folder, node, start, end, only_whole=True) for node in nodes]
    has_others = any(each.has_other_gpus for each in samples)
    use = {}
    for figure in (each for each in FIGURES if each.key):
        is_of_gpus = figure.parts is Parts.MEAN_OF_GPUS
        if is_of_gpus and has_others:
            continue
        wholes = [
            (each.curves[figure.title].whole, each.gpus if is_of_gpus else 1)
            for each in samples
            if figure.title in each.curves
        ]
        found = [(whole, count) for whole, count in wholes if whole is not None and whole.finite]
        is_partial = is_of_gpus and len(found) < sum(each.gpus > 0 for each in samples)
        if found and not is_partial:
            total = sum(whole.total * count for whole, count in found)
            mean = total / sum(whole.finite * count for whole, count in found)
            highest = max(whole.high.y for whole, _ in found if whole.high is not None)
            use[figure.key] = (highest if figure.is_highest else mean) / figure.size
    return use


@dataclass
class _NodeSamples:
    """The samples of a node in a span of time.

    curves: chart title -> values by Unix time. ends: the earliest and the latest time, [] if there
        are none.
    count: the number of samples at any time. left_out: sentences on samples that were not read.
    gpus: the most GPUs in a sample. has_other_gpus: whether some may be those of other jobs.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    ends: Sequence[float] = ()
    count: int = 0
    left_out: list[str] = field(default_factory=list)
    gpus: int = 0
    has_other_gpus: bool = False

    @classmethod
    def of(
        cls, folder: Path, node: str, start: float, end: float, *, only_whole: bool = False
    ) -> _NodeSamples:
        """Read the samples of a node. only_whole: leave out means over time that began earlier."""
        found = cls()
        for block in stored(NodeFile(folder, node, found.left_out)):
            found._add(block, start, end, only_whole=only_whole)
        return found

    def _add(self, block: Block, start: float, end: float, *, only_whole: bool) -> None:
        times = block.place.ys
        self.count += len(times)
        inside = [at for at, time in enumerate(times) if start <= time <= end]
        if not inside:
            return
        columns = block.columns
        own_times = [*self.ends, *(times[at] for at in inside)]
        self.ends = min(own_times), max(own_times)
        self.gpus = max(self.gpus, *(int(columns[GPUS].ys[at]) for at in inside))
        self.has_other_gpus |= OTHER_GPUS in columns and bool(
            columns[OTHER_GPUS].within(start, end)
        )
        since = columns[BEFORE].ys
        early = {at for at in inside if only_whole and since[at] < start}
        by_counters = columns[BY_COUNTERS].ys if BY_COUNTERS in columns else ()
        counted_early = {at for at in early if by_counters and by_counters[at] == 1}
        for figure in (each for each in FIGURES if each.title in columns):
            title = figure.title
            values = columns[title].ys
            outside = counted_early if figure.is_mean is None else early if figure.is_mean else ()
            used = [at for at in inside if at not in outside and not math.isnan(values[at])]
            placed = [times[at] for at in used], [values[at] for at in used]
            if used:
                column = Column(*placed, rises=block.place.rises)
                self.curves.setdefault(title, Curve()).extend(TIME, column)


def compare_ranks(
    means: Sequence[float], slowest: Sequence[float], windows: int, hosts: Sequence[str]
) -> str:
    """Return a sentence that compares the ranks and names the straggler: a node or, on one node, a
    rank.

    means: each rank's milliseconds of computing per step. windows: the number of windows of ten
        steps.
    slowest: for each rank, the number of windows in which this rank was slowest. hosts: each rank's
    node. A straggler is named only if chance is an improbable cause (Chernoff-Hoeffding bound
    exp(-n KL)).
    """
    names = hosts if len({*hosts}) > 1 else [f"rank {rank}" for rank in range(len(means))]
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(names):
        ranks[name].append(rank)
    worst = max(ranks, key=lambda name: sum(slowest[rank] for rank in ranks[name]))
    share = sum(slowest[rank] for rank in ranks[worst]) / windows
    fair = len(ranks[worst]) / len(means)
    worst_mean = sum(means[rank] for rank in ranks[worst]) / len(ranks[worst])
    other_median = statistics.median(
        means[rank] for name in ranks if name != worst for rank in ranks[name]
    )
    slow, rest, low, high = (
        formatting.quantity(ms, "ms") for ms in (worst_mean, other_median, min(means), max(means))
    )
    if worst_mean >= _SLOWER * other_median and windows * _divergence(share, fair) >= -math.log(
        _BY_CHANCE
    ):
        return (
            f"{worst} is a straggler: it computed a mean of {slow} per step, "
            f"the other ranks a median of {rest}; it was slowest in "
            f"{formatting.percent(100 * share)} of {windows} windows of ten steps"
        )
    too_few = windows * _divergence(1.0, fair) < -math.log(_BY_CHANCE)
    verdict = "too few steps to detect a straggler" if too_few else "no node is a straggler"
    return f"ranks computed means of {low} to {high} per step; {verdict}"


def _divergence(share: float, fair: float) -> float:
    """Return the KL divergence of Bernoulli(share) from Bernoulli(fair); 0 if ``share`` <=
    ``fair``.
    """
    parts = ((share, fair), (1 - share, 1 - fair))
    return sum(a * math.log(a / b) for a, b in parts if a > 0) if share > fair else 0.0
