"""Charts of the metrics that a program wrote: over steps, by a sweep's parameters, and the time of
a step.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from clusterctl.runs.compare import mapping
from clusterctl.runs.curve import STEP, Column, Curve, FiniteValues
from clusterctl.runs.facts import SPEEDS
from clusterctl.runs.find import Row, metric_of
from clusterctl.runs.groups import MeanLines, grouped, is_seed
from clusterctl.runs.metric_files import Block, MetricFiles
from clusterctl.runs.page import FAINT, Chart, Kind, Section, Series, Table, thinned
from clusterctl.runs.table import stored
from clusterctl.scheduler.base import JobState
from clusterctl.spec.names import first_few
from clusterctl.util import formatting
from clusterctl.util.numbers import counted, finite, is_number

MOST_LINES: Final = 16  # per chart
# The clocks of hosts differ a little, and Slurm reports whole seconds.
CLOCK_S: Final = 2.0
MOST_CHARTS: Final = 16
_MOST_STALLS: Final = 100
# A sum of this many windows of ten steps is damaged.
_MOST_WINDOWS: Final = 50_000
EXPOSED: Final = "comm_exposed_ms"
# The name of a chart's metrics without words for training and evaluation, and the axis of their
# values.
_Group: TypeAlias = tuple[str, str]
# Metrics of training and of evaluation that are shown in the same chart.
_SPLIT: Final = re.compile(
    r"^(?:(train(?:ing)?)|val(?:id(?:ation)?)?|eval(?:uation)?|test|dev)[/_.]"
)
_OF_A_RANK: Final = re.compile(r"^rank\d+/")
# Metrics of the bundled `train` that the report shows in sentences or in charts of their own.
_OWN_CHARTS: Final = frozenset(
    (
        "seconds data_ms comm_total_ms comm_exposed_ms skipped eval_seconds eval_save_s eval_windows stall_s "
        "write_s bytes"
    ).split()
)
# The parts of a step's time.
PARTS: Final = ("compute", "exposed communication", "data")
# Lines closer than this share of the chart's height hide each other.
_LINE: Final = 0.01
# Points of a line from which a smoothed line can be shown, and the number of points of the smoothed
# line.
_SMOOTH_FROM: Final = 40
_SMOOTH: Final = 50
# The factor between the values of a parameter from which its axis is logarithmic.
_WIDE: Final = 10
# A line with a peak this many times lower than another line's can't be seen beside it on a linear
# axis.
_FAR: Final = 20
# A metric is a multiple of another metric if it has at least this many values, and differs from the
# multiple by at most this share of each value and of the height of its chart.
_MULTIPLE_FROM: Final = 3
_MULTIPLE: Final = 1e-4


@dataclass
class RankTimes:
    """The computing of each rank, by the evaluations of the bundled `train`.

    means: milliseconds per step. slowest: the number of windows in which each rank was the slowest.
    """

    windows: int = 0
    means: list[float] = field(default_factory=list)
    slowest: list[float] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        means, slowest, windows = (line.get(key) for key in ("compute_ms", "slowest", "windows"))
        if isinstance(means, list) and isinstance(slowest, list) and isinstance(windows, int):
            complete = (
                len(means)
                == len(finite_values(means))
                == len(finite_values(slowest))
                == len(slowest)
            )
            if complete and 0 < windows < _MOST_WINDOWS and len(means) == len(self.means or means):
                totals = [mean * self.windows for mean in self.means] or [0.0] * len(means)
                self.windows += windows
                self.means = [
                    (total + mean * windows) / self.windows
                    for total, mean in zip(totals, means, strict=True)
                ]
                earlier = self.slowest or [0] * len(means)
                self.slowest = [sum(pair) for pair in zip(earlier, slowest, strict=True)]


@dataclass
class ProgramMetrics:
    """The metrics that the program of a run or task wrote over time, with times in milliseconds.

    curves: by the name of the metric.
    samples: the values of metrics whose median is needed, and as ``STEP`` the times of steps.
    parts: a curve for each of PARTS, over the steps that have them all.
    stalls: step and time of the last checkpoints. stall_ms: the sum of all, of which there are
        stall_count.
    hosts: rank -> host. seconds: the duration that the program measured since its last start.
    samples_done: the samples of all steps, also of steps that were computed twice; None if unknown.
    left_out: sentences on metrics that were not read.
    has_clock: whether the times in the curves are by the same clock as those of the job.
    """

    curves: dict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))
    samples: dict[str, FiniteValues] = field(default_factory=dict)
    parts: Sequence[Curve] = field(default_factory=lambda: [Curve() for _ in PARTS])
    stalls: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_STALLS))
    stall_ms: float = 0.0
    stall_count: int = 0
    hosts: dict[int, str] = field(default_factory=dict)
    ranks: RankTimes = field(default_factory=RankTimes)
    began: float | None = None
    ended: float | None = None
    has_clock: bool = True
    seconds: float | None = None
    samples_done: float | None = None
    pipelined: bool = False
    is_ours: bool = False
    left_out: Sequence[str] = ()

    @classmethod
    def of(cls, row: Row, metric: str = "") -> ProgramMetrics:
        """Return the metrics of a run or a task. metric: a metric whose median is needed."""
        metrics = cls()
        metrics.samples = {name: FiniteValues() for name in (*SPEEDS, EXPOSED, metric, STEP)}
        files = MetricFiles(row.folder)
        for block in stored(files):
            metrics._add(block)
        metrics.left_out = files.left_out
        start = row.record.start_time or 0
        end = row.record.end_time or math.inf
        for moment in (metrics.began, metrics.ended):
            if moment is not None and not start - CLOCK_S <= moment <= end + CLOCK_S:
                # The program used another clock, such as the seconds since its start.
                metrics.began = metrics.ended = None
                metrics.has_clock = False
        return metrics

    def median(self, name: str) -> float | None:
        """Return the median of a metric, or of the times of steps (``STEP``); None without
        values.
        """
        return self.samples[name].median()

    @property
    def mean_step_ms(self) -> float | None:
        """The mean time of a step, without checkpoints and evaluations; None if the program is
        another's.
        """
        totals = self.part_means
        return sum(totals) if totals and sum(totals) < math.inf else None

    @property
    def part_means(self) -> list[float]:
        """The mean time of each part of a step; [] if the program is another's."""
        wholes = [curve.whole for curve in self.parts]
        return [whole.mean for whole in wholes if whole is not None and whole.mean is not None]

    def _add(self, block: Block) -> None:
        for name, column in block.columns.items():
            self.curves[name].extend(block.axis, column)
            if name in self.samples:
                self.samples[name].extend(column.ys)
        if times := [time for time in block.place.times or () if time is not None]:
            self.began = min(times if self.began is None else (self.began, *times))
            self.ended = max(times if self.ended is None else (self.ended, *times))
        match block.kind:
            case "run":
                for line in block.lines:
                    self._add_start(line)
            case "iteration":
                self._add_steps(block)
            case "result":
                self.seconds = finite(block.lines[-1].get("seconds"))
            case "checkpoint":
                for x, line in zip(block.place.xs or (), block.lines, strict=True):
                    for seconds in finite_values([line.get("stall_s")]):
                        self.stalls.append((x, 1e3 * seconds))
                        self.stall_ms += 1e3 * seconds
                        self.stall_count += 1
            case "evaluation":
                for line in block.lines:
                    self.ranks.add(line)

    def _add_start(self, line: Mapping[str, Any]) -> None:
        self.is_ours = True
        listed = line.get("ranks")
        ranks = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
        self.hosts = {number: str(row.get("host", "")) for number, row in enumerate(ranks)}
        self.pipelined = mapping(line, "config").get("pp", 1) != 1

    def _add_steps(self, block: Block) -> None:
        columns = [block.columns.get(key) for key in ("seconds", EXPOSED, "data_ms")]
        seconds, *others = columns
        if seconds is None:
            return
        speeds = block.columns.get(SPEEDS[0])
        if speeds is not None and len(speeds.ys) == len(seconds.ys):
            samples = sum(speed * time for speed, time in zip(speeds.ys, seconds.ys, strict=True))
            self.samples_done = samples + (self.samples_done or 0.0)
        steps_ms = [1e3 * value for value in seconds.ys]
        self.samples[STEP].extend(steps_ms)
        exposed, data = others
        if (
            exposed is None
            or data is None
            or not len(seconds.ys) == len(exposed.ys) == len(data.ys)
        ):
            return
        waits = exposed.ys
        loads = data.ys
        xs = seconds.xs or ()
        if not math.isfinite(sum(map(sum, (steps_ms, waits, loads)))):
            rows = zip(steps_ms, waits, loads, xs, strict=True)
            finite_rows = [row for row in rows if all(map(math.isfinite, row))]
            steps_ms, waits, loads, xs = ([row[at] for row in finite_rows] for at in range(4))
        listed = zip(steps_ms, waits, loads, strict=True)
        compute = [max(0.0, step - wait - load) for step, wait, load in listed]
        for curve, ys in zip(self.parts, (compute, waits, loads), strict=True):
            curve.extend(
                block.axis, Column(xs, ys, rises=seconds.rises and len(ys) == len(seconds.ys))
            )


def line_chart(
    title: str,
    lines: Sequence[Series],
    x: str = "step",
    unit: str = "",
    *,
    x_end: float | None = None,
) -> Chart:
    """Return a chart of lines, with units that fit their values. Of a repeated x the last value is
    drawn.

    x: title of the axis. With the unit ``s`` it is an axis of time. x_end: the end of the axis x.
    unit: of the values, such as B or s. Such values are amounts or shares, so their axis begins at
        0.
    """
    lines = _as_far_as_the_finite(lines)
    places = [place for line in lines for place, _ in line.points]
    x_unit, x_size = formatting.fitting_unit(x, places if x_end is None else [x_end])
    y_unit, y_size = formatting.fitting_unit(
        unit, (value for line in lines for _, value in line.points)
    )
    drawn: list[Series] = []
    for line in lines:
        values = {x: math.nan if value is None else value / y_size for x, value in line.points}
        points = [(place / x_size, values[place]) for place in sorted(values)]
        smooth = () if line.marks or len(points) < _SMOOTH_FROM else _means(points)
        if line.smooth:
            smooth = [(place / x_size, value / y_size) for place, value in line.smooth]
        drawn.append(replace(line, points=thinned(points), smooth=smooth))
    end = None if x_end is None else x_end / x_size
    return _on_axis(Chart(title, drawn, x_unit, y_unit, x_end=end), unit)


def _as_far_as_the_finite(lines: Sequence[Series]) -> Sequence[Series]:
    """Return the lines of a chart, those that end with NaN or infinity only as far as the other
    lines reach, so that a run that diverged does not set the axis unless all did. The legend names
    such runs.
    """
    diverged = [bool(line.points) and finite(line.points[-1][1]) is None for line in lines]
    heights = finite_values(
        y
        for line, is_lost in zip(lines, diverged, strict=True)
        if not is_lost
        for _, y in line.points
    )
    lost = {line.run or line.name for line, is_lost in zip(lines, diverged, strict=True) if is_lost}
    named = [
        replace(line, run=f"{line.run or line.name} (diverged)")
        if (line.run or line.name) in lost
        else line
        for line in lines
    ]
    if not heights:
        return named
    low, high = min(heights), max(heights)

    def shown(y: float | None) -> float | None:
        return y if y is not None and low <= y <= high else None

    return [
        replace(line, points=[(x, shown(y)) for x, y in line.points], smooth=())
        if is_lost
        else line
        for line, is_lost in zip(named, diverged, strict=True)
    ]


def _on_axis(chart: Chart, unit: str) -> Chart:
    """Return the chart with an axis that fits: from 0 if the values have a unit, logarithmic if
    needed.
    """
    lines = chart.series
    if chart.kind == Kind.POINTS:
        lines = [Series("", [point]) for line in lines for point in line.points]
    y_log = not unit and _needs_log(lines)
    drawn = with_covers(chart.series, log=y_log, from_zero=bool(unit))
    return replace(chart, series=drawn, from_zero=bool(unit), y_log=y_log)


def _needs_log(lines: Sequence[Series]) -> bool:
    """Return whether a line can't be seen on a linear axis, such as beside that of a task that
    diverged.
    """
    heights = [finite_values(y for _, y in line.points) for line in lines]
    unmarked = [ys for line, ys in zip(lines, heights, strict=True) if not line.marks]
    peaks = [max(ys) for ys in unmarked if max(ys, default=0.0) > 0]
    bands = [finite_values(y for ends in line.spread for y in ends) for line in lines]
    is_positive = all(y >= 0 for ys in (*heights, *bands) for y in ys)
    return bool(peaks) and is_positive and max(peaks) >= _FAR * min(peaks)


def with_covers(
    lines: Sequence[Series], *, log: bool = False, from_zero: bool = False
) -> list[Series]:
    """Return the lines of a chart, with the number of earlier lines that each line hides.

    log: whether the axis is logarithmic. from_zero: whether it begins at 0.
    """
    placed = [
        replace(line, points=[(x, math.log10(y) if y else None) for x, y in line.points])
        if log
        else line
        for line in lines
    ]
    heights = finite_values(y for line in placed for _, y in line.points)
    lowest = 0.0 if from_zero else min(heights, default=0.0)
    near = _LINE * (max(heights, default=0.0) - lowest)
    covers = [
        sum(_covers(line, other, near) for other in placed[:at]) for at, line in enumerate(placed)
    ]
    return [replace(line, covers=count) for line, count in zip(lines, covers, strict=True)]


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / _SMOOTH)
    chunks = (points[at : at + size] for at in range(0, len(points), size))
    finite_chunks = ([point for point in chunk if math.isfinite(point[1])] for chunk in chunks)
    return [
        (sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk))
        for chunk in finite_chunks
        if chunk
    ]


def _covers(line: Series, other: Series, near: float) -> bool:
    """Return whether at least half of a line lies on another line, which then can't be seen."""
    gaps = [gap for point in line.points if (gap := _gap(point, other.points)) is not None]
    return line.marks == other.marks and 2 * sum(gap <= near for gap in gaps) >= max(1, len(gaps))


def _gap(point: tuple[Any, float | None], line: Sequence[tuple[Any, float | None]]) -> float | None:
    """Return the distance of a point from a line at the same x; None if the line has no value
    there.
    """
    x, y = point
    at = bisect_left(line, x, key=lambda each: each[0])
    around = (
        line[at : at + 1] if at < len(line) and line[at][0] == x else line[max(0, at - 1) : at + 1]
    )
    if not around:
        return None
    x0, y0 = around[0]
    x1, y1 = around[-1]
    if y is None or y0 is None or y1 is None or not x0 <= x <= x1:
        return None
    return abs(y - (y0 + (y1 - y0) * ((x - x0) / (x1 - x0) if x1 > x0 else 0)))


def metrics_section(
    runs: Mapping[str, ProgramMetrics], missing: list[str], only: Sequence[str] = ()
) -> Section:
    """Return charts of the metrics ``only`` (empty: all), with a line per run. ``missing``: gets
    messages.

    A run has the same color in all charts. The metrics of a single run have a color each. Metrics
    that never changed are listed instead. A multiple of another metric is named in the title of
    that metric's chart, and its range is listed.
    """
    groups: dict[_Group, list[str]] = defaultdict(list)
    unchanged: list[str] = []
    shown: dict[Any, list[_Values]] = defaultdict(list)
    multiples: dict[_Group, list[tuple[str, str]]] = defaultdict(list)
    ranges: list[str] = []
    is_bundled = any(metrics.is_ours for metrics in runs.values())
    listed = {
        name: {
            title: metrics.curves[name] for title, metrics in runs.items() if name in metrics.curves
        }
        for name in dict.fromkeys(name for metrics in runs.values() for name in metrics.curves)
        if not (name in _OWN_CHARTS and is_bundled) and not (only and name not in only)
    }
    drawn_values = [
        _Values(
            name,
            axis,
            {title: curve for title, curve in curves.items() if curve.drawn_axis == axis},
        )
        for name, curves in listed.items()
        for axis in dict.fromkeys(curve.drawn_axis for curve in curves.values())
    ]
    # Metrics with a single value come last: they have no chart, or are in that of another metric.
    for values in sorted(drawn_values, key=lambda values: values.count == 1):
        is_alone = len(runs) == 1 and values.group not in groups
        if len({*values.ys}) == 1 and (is_alone or values.count > 1):
            unchanged.append(
                f"{values.name} {formatting.quantity(values.highest, formatting.unit_of(values.name))}"
            )
            continue
        alike = shown[values.places]
        factors = ((other, values.factor(other)) for other in alike)
        first, factor = next(
            ((first, factor) for first, factor in factors if factor), (values, None)
        )
        if factor is None:
            alike.append(values)
            groups[values.group].append(values.name)
        else:
            times = "the same as" if factor == 1 else f"{formatting.number(factor)} times"
            multiples[first.group].append((f"{values.name} is {times}", first.name))
            if factor != 1:
                low, high = (
                    formatting.quantity(y, formatting.unit_of(values.name))
                    for y in (values.lowest, values.highest)
                )
                ranges.append(f"{values.name}, {times} {first.name}: {low} to {high}")
    if len(groups) > MOST_CHARTS:
        missing.append(f"charts of {counted(len(groups) - MOST_CHARTS, 'more metric')}")
    for title, metrics in runs.items():
        missing.extend(f"{title}: {text}" if title else text for text in metrics.left_out)
    drawn = sorted(groups, key=_order)[:MOST_CHARTS]
    charts = [_metric_chart(group, groups[group], runs, multiples[group]) for group in drawn]
    lines = (
        [f"a single value each, so without a chart: {', '.join(unchanged)}"] if unchanged else []
    )
    return Section("Metrics", [*lines, *ranges, *_place_lines(listed)], charts)


def _place_lines(listed: Mapping[str, Mapping[str, Curve]]) -> Iterator[str]:
    """Yield sentences on values that a chart does not have. listed: metric -> title of a run ->
    curve.
    """
    repeated: dict[str, list[str]] = defaultdict(list)
    unplaced: dict[str, list[str]] = defaultdict(list)
    by_row: dict[str, list[str]] = defaultdict(list)
    for name, curves in listed.items():
        for title, curve in curves.items():
            where = f" of {title}" if title else ""
            if curve.drawn_axis != curve.axis:
                counts = f"{curve.same:,} of {curve.count:,} values{where} have"
                by_row[
                    f"{counts} the {curve.axis} of the value before, so the chart is by row"
                ].append(name)
            elif curve.repeated:
                counts = f"{curve.repeated:,} of {curve.count:,} values{where} have"
                repeated[f"{counts} the {curve.axis} of an earlier value, or one before it"].append(
                    name
                )
            if curve.unplaced and curve.drawn_axis == curve.axis:
                counts = f"{curve.unplaced:,} of {curve.count:,} values{where} have"
                unplaced[f"{counts} no {curve.axis}"].append(name)
    for text, names in by_row.items():
        yield f"{first_few(names, MOST_LINES)}: {text}"
    for text, names in repeated.items():
        yield (
            f"{first_few(names, MOST_LINES)}: {text}, for example after a restart; charts have "
            "the latest values"
        )
    for text, names in unplaced.items():
        yield f"{first_few(names, MOST_LINES)}: {text}, and are not in charts"


class _Values:
    """The values of a metric in runs, by the same axis. ys: None for NaN. count: the most values in
    a run.

    Of a curve with very many values, ``ys`` and ``places`` are those of its buckets.
    """

    def __init__(self, name: str, axis: str, curves: Mapping[str, Curve]) -> None:
        self.name = name
        self.group: _Group = _SPLIT.sub("", _OF_A_RANK.sub("", name)), axis
        self.count = max(curve.count for curve in curves.values())
        buckets = [bucket for curve in curves.values() for bucket in curve.buckets]
        self.places = tuple(
            (title, curve.size, tuple(place for place, _ in curve.thin()))
            for title, curve in curves.items()
        )
        points = (
            point
            for bucket in buckets
            for point in (
                (bucket.first,) if bucket.count == 1 else (bucket.low, bucket.high, bucket.gap)
            )
        )
        self.ys = [None if point is None or math.isnan(point.y) else point.y for point in points]
        numbers = [y for y in self.ys if y is not None]
        self.lowest = min(numbers, default=math.nan)
        self.highest = max(numbers, default=math.nan)

    def factor(self, other: _Values) -> float | None:
        """Return the factor by which the metric is a multiple of another metric at the same steps,
        if any.
        """
        if self.ys == other.ys:
            return 1.0
        factor = self.highest / (other.highest or 1.0)
        height = self.highest - self.lowest
        is_multiple = (
            self.count >= _MULTIPLE_FROM
            and len(self.ys) == len(other.ys)
            and all(
                y == y0
                if y is None or y0 is None
                else abs(y - factor * y0) <= _MULTIPLE * min(abs(y), height)
                for y, y0 in zip(self.ys, other.ys, strict=True)
            )
        )
        return factor if is_multiple and factor > 0 else None


def _order(group: _Group) -> tuple[int, _Group]:
    """Return a sort key: losses and accuracies come first."""
    words = ("loss", "acc", "perplexity", "bits", "samples_per_s", "tokens_per_s")
    return next((rank for rank, word in enumerate(words) if word in group[0]), len(words)), group


def _metric_chart(
    group: _Group,
    names: Sequence[str],
    runs: Mapping[str, ProgramMetrics],
    multiples: Sequence[tuple[str, str]],
) -> Chart:
    """Return a chart of a metric's values in training and in evaluations, which are markers.

    multiples: words such as "mfu is 0.01 times", and the name of the metric that is drawn.
    """
    is_single = len(names) == 1
    base, axis = group
    title = names[0] if is_single else base
    marked = [name for name in names if _is_evaluation(name)]
    is_marked = len(runs) > 1 and 0 < len(marked) < len(names)
    notes = [f"markers: {', '.join(marked)}"] if is_marked else []
    notes += [f"{words} {'this' if is_single else name}" for words, name in multiples]
    more = f" ({', '.join(notes)})" if notes else ""
    return line_chart(
        f"{title}{more}", _metric_lines(names, axis, runs), axis, formatting.unit_of(names[0])
    )


def _metric_lines(
    names: Sequence[str], axis: str, runs: Mapping[str, ProgramMetrics]
) -> list[Series]:
    lines = []
    for number, (title, metrics) in enumerate(runs.items()):
        for at, name in enumerate(names):
            curve = metrics.curves.get(name)
            if curve is not None and curve.drawn_axis == axis:
                words = [title, name] if len(names) > 1 else [title or name]
                color = number if len(runs) > 1 else at
                marks = _is_evaluation(name)
                full_name = " ".join(filter(None, words))
                smooth = () if curve.is_complete or marks else curve.means(_SMOOTH)
                lines.append(
                    Series(full_name, curve.points(), color, marks, smooth=smooth, run=title)
                )
    return lines


def loss_lines(metrics: ProgramMetrics) -> list[Series]:
    """Return the losses of a run by Unix time; [] if the program did not log its loss with the
    time.
    """
    names = [name for name in metrics.curves if _SPLIT.sub("", name) == "loss"]
    lines = []
    for at, name in enumerate(names if metrics.has_clock else ()):
        points = (point for bucket in metrics.curves[name].buckets for point in bucket.points())
        timed = [(point.time, point.y) for point in points if point.time is not None]
        if timed:
            lines.append(Series(name, timed, at, _is_evaluation(name)))
    return lines


def _is_evaluation(name: str) -> bool:
    match = _SPLIT.match(name)
    return match is not None and match[1] is None


def step_charts(metrics: ProgramMetrics) -> Iterator[Chart]:
    if metrics.part_means:
        curves = metrics.parts
        areas = [Series(name, curve.means(100)) for name, curve in zip(PARTS, curves, strict=True)]
        size = math.ceil(len(curves[0].buckets) / 100) * curves[0].size
        unit = "ms" if size == 1 else f"ms, mean of {size:,} steps"
        yield Chart("Parts of a step", areas, y=unit, kind=Kind.AREAS)
    if metrics.stalls:
        stalls = [(f"{step:.15g}", stall) for step, stall in metrics.stalls]
        count = metrics.stall_count
        title = (
            f"Checkpoints (the last {len(stalls)} of {count:,})"
            if count > len(stalls)
            else "Checkpoints"
        )
        yield Chart(title, [Series("wait of rank 0", stalls)], y="ms", kind=Kind.BARS)


def parameter_chart(key: str, metric: str, tasks: Sequence[Row]) -> Chart:
    """Return a chart of a metric by a parameter.

    tasks: in the order of their colors in the charts of metrics.
    """
    # The charts of metrics show only the first tasks.
    colors = [number if number < MOST_LINES else FAINT for number in range(len(tasks))]
    plotted = [
        (x, y, color, task.record.state == JobState.COMPLETED)
        for task, color in zip(tasks, colors, strict=True)
        if (x := task.value(key)) is not None and isinstance(y := task.value(metric), float)
    ]
    numbers = sorted((x, y, color, done) for x, y, color, done in plotted if is_number(x))
    texts = sorted((str(x), y, color, done) for x, y, color, done in plotted)
    is_numeric = len(numbers) == len(plotted)
    points = numbers if is_numeric else texts
    completed = [(x, y) for x, y, _, has_completed in points if has_completed]
    others = [(x, y) for x, y, _, has_completed in points if not has_completed]
    series = []
    if completed:
        completed_colors = [color for _, _, color, has_completed in points if has_completed]
        series.append(Series(metric, completed, completed_colors))
    if others:
        series.append(Series("did not complete", others, [FAINT] * len(others)))
    is_wide = (
        is_numeric
        and bool(numbers)
        and numbers[0][0] > 0
        and numbers[-1][0] >= _WIDE * numbers[0][0]
        and not is_seed(key)
    )
    chart = Chart(f"{metric} by {key}", series, key, metric, Kind.POINTS, x_log=is_wide)
    return _on_axis(chart, formatting.unit_of(metric))


def seeds_section(rows: Sequence[Row], metrics: Sequence[str]) -> Section:
    """Return means and spreads of runs that differ only in their seed. Empty if there are no such
    runs.

    metrics: keys; the chart has the first.
    """
    groups = grouped(rows, metrics=metrics)
    if not groups.over or not groups.has_means:
        return Section("Seeds")
    head, cells = groups.table()
    section = Section("Seeds", [*groups.notes()], tables=[Table(head, cells)])
    drawn = [group for group in groups.groups if len(group.counted) > 1][:MOST_LINES]
    metric = metric_of(metrics[0])
    drawn_means = MeanLines.of(drawn, metric)
    section = replace(section, lines=[*dict.fromkeys((*section.lines, *drawn_means.notes()))])
    if not drawn_means.lines:
        return section
    stride = max(line.stride for line in drawn_means.lines)
    series = []
    for number, line in enumerate(drawn_means.lines):
        means = thinned((step, spread.mean) for step, spread in line.points)
        bands = dict(line.points)
        band = [bands[step].ends for step, _ in means]
        series.append(Series(line.legend, means, number, spread=band))
    title = f"{metric}: mean of the seeds ± standard deviation"
    title += f", of one of {stride:,} values" if stride > 1 else ""
    chart = Chart(title, series, drawn_means.axis, metric)
    return replace(section, charts=[_on_axis(chart, formatting.unit_of(metric))])


def finite_values(values: Iterable[Any]) -> list[float]:
    return [number for number in map(finite, values) if number is not None]
