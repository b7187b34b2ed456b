"""The table and the picture of a scaling: the runs of `submit --scaling` on each number of nodes.

A figure of a number of nodes is the mean over its runs, with the sample standard deviation. The speed-up of a
run is its speed divided by the mean speed on the smallest number of nodes.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import CollectError, UsageError
from clusterctl.runs.charts import EXPOSED, SPEEDS, ProgramMetrics, with_covers
from clusterctl.runs.compare import environment_of, hardware_of, mapping
from clusterctl.runs.curve import STEP
from clusterctl.runs.find import Row, is_usual, metric_names, reject_unknown_keys, runs_of_scaling
from clusterctl.runs.metric_files import finite
from clusterctl.runs.page import Chart, Report, Section, Series, Table
from clusterctl.runs.series import events_in
from clusterctl.runs.telemetry import FIGURES, node_use
from clusterctl.scheduler.attempts import program_seconds
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.directives import Directives
from clusterctl.spec.metrics import Goal, goal_of, is_time_of_all_work
from clusterctl.spec.units import GIB_MIB

_TIME: Final = "time_s"
_STEP: Final = "step_ms"
_SPEED_UP: Final = "speed_up"
_EFFICIENCY: Final = "efficiency_percent"
# The titles of figures in the table. Other figures are metrics, with names of their own.
_TITLES: Final = {
    _TIME: "time, s",
    _STEP: "step, ms",
    _SPEED_UP: "speed-up",
    _EFFICIENCY: "efficiency, %",
    "comm_exposed_percent": "exposed communication, % of a step",
    **{figure.key: f"{figure.heading}, {figure.key_unit}" for figure in FIGURES if figure.key},
    "energy_kj": "GPU energy, kJ",
}
# Words in the names of metrics: the first metric with each word is in the table.
_CONVERGENCE: Final = ("loss", "acc")
# From this factor, and this many seconds, two runs took clearly different times.
_CLEAR: Final = 1.1
_CLEAR_S: Final = 1.0
_PUBLISHED: Final = Path(__file__).parent / "published.toml"


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of the values of some runs, and their sample standard deviation (0 for a single run)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    def __str__(self) -> str:
        """Return a text such as ``290 ± 17``; without a deviation that four digits do not show."""
        places = _places(self.mean, 4)
        if self.deviation < 10**-places / 2:
            text = f"{self.mean:,.{places}f}"
            return text.rstrip("0").rstrip(".") if places else text
        places = min(_places(self.deviation, 2), places)
        return f"{self.mean:,.{places}f} ± {self.deviation:,.{places}f}"

    def times(self, factor: float) -> Spread:
        return Spread(self.mean * factor, self.deviation * factor)


@dataclass(frozen=True, slots=True)
class Size:
    """The completed runs on a number of nodes. figures: by name. published: the same of other systems."""

    nodes: int
    ranks: int
    runs: int
    figures: Mapping[str, Spread]
    published: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A program with its options on each number of nodes. title: the options that a sweep sets, or ""."""

    title: str
    sizes: Sequence[Size]
    source: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scaling of a program. name: of its jobs. metric: the figure that measures the speed.

    goal: whether lower or higher values of the metric are faster; None if it is not known.
    shares_machine: whether nodes are containers of the same machine. hardware: that of the nodes.
    differs: whether this is other hardware than that of the published figures. missing: runs without figures.
    clocks: how the times were measured.
    """

    name: str
    weak: bool
    metric: str
    goal: Goal | None
    curves: Sequence[Curve]
    shares_machine: bool
    hardware: str
    differs: bool
    missing: Sequence[str]
    clocks: Sequence[str] = ()

    @property
    def counts(self) -> list[int]:
        """The numbers of nodes of all curves, in ascending order."""
        return sorted({size.nodes for curve in self.curves for size in curve.sizes})

    def verdict(self) -> Iterator[str]:
        if self.shares_machine:
            yield (
                "nodes share a machine and its cores: this speed-up and efficiency say nothing about "
                "separate machines"
            )
        kind = "weak" if self.weak else "strong"
        for curve in self.curves:
            first, last = curve.sizes[0], curve.sizes[-1]
            name = f"{curve.title}: " if curve.title else ""
            if _SPEED_UP in last.figures and last is not first:
                speed_up, efficiency = last.figures[_SPEED_UP], last.figures[_EFFICIENCY]
                times = "" if str(speed_up) == "1" else f"{speed_up} times "
                faster = f"{times}as fast as on {_nodes(first.nodes)}"
                slower = f"slower than on {_nodes(first.nodes)}, speed-up {speed_up}"
                yield (
                    f"{name}{kind} scaling by {_TITLES.get(self.metric, self.metric)}{self._direction}: on "
                    f"{_nodes(last.nodes)} {slower if speed_up.mean < 1 else faster}, efficiency "
                    f"{efficiency} %"
                )
                yield from self._contradiction(curve, name)
            common = [key for key in first.figures if is_usual(key) and key in last.figures]
            for key in common if last is not first else ():
                yield (
                    f"{name}{key} {last.figures[key]} on {_nodes(last.nodes)}, {first.figures[key]} on "
                    f"{_nodes(first.nodes)}"
                )

    @property
    def _direction(self) -> str:
        """The direction of the metric as text; "" for the time, whose direction nobody doubts."""
        return "" if self.goal is None or self.metric == _TIME else f" ({self.goal.words})"

    def _contradiction(self, curve: Curve, name: str) -> Iterator[str]:
        """Yield a sentence if more nodes are faster by the metric and slower by the times, or vice versa."""
        first, *others = curve.sizes
        for size in reversed(others if self.metric != _TIME and _TIME in first.figures else ()):
            if _SPEED_UP not in size.figures or _TIME not in size.figures:
                continue
            speed_up, before, after = size.figures[_SPEED_UP], first.figures[_TIME], size.figures[_TIME]
            grown = size.nodes / first.nodes if self.weak else 1.0
            by_time = before.mean / after.mean * grown if after.mean > 0 else 1.0
            low, high = sorted((speed_up.mean, by_time))
            is_clear = abs(after.mean - grown * before.mean) >= max(
                _CLEAR_S, before.deviation, after.deviation
            )
            if is_clear and low * _CLEAR <= 1 <= high / _CLEAR:
                yield (
                    f"{name}{self.metric} and the times contradict each other: by {self.metric}, "
                    f"{_nodes(size.nodes)} have a speed-up of {speed_up}, but the time went from "
                    f"{before} s to {after} s; check --goal, which is {self.goal}, and what the "
                    "program measures"
                )
                return

    def table(self) -> Table:
        """Return the table: a column for each number of nodes, a row for each figure of each curve."""
        counts = self.counts
        rows: list[Sequence[str]] = []
        for curve in self.curves:
            sizes = {size.nodes: size for size in curve.sizes}
            shown = [sizes.get(count) for count in counts]
            rows += [[curve.title, *("" for _ in counts)]] if curve.title else []
            rows += [
                [key, *("-" if size is None else str(getattr(size, key)) for size in shown)]
                for key in ("ranks", "runs")
            ]
            for name in dict.fromkeys(name for size in curve.sizes for name in size.figures):
                title = _TITLES.get(name, name)
                title += self._direction if name == self.metric else ""
                spreads = [size.figures.get(name) if size else None for size in shown]
                if title.endswith("GiB") and all(each is None or each.mean < 1 for each in spreads):
                    title = f"{title.removesuffix('GiB')}MiB"
                    spreads = [each and each.times(GIB_MIB) for each in spreads]
                rows.append([title, *("-" if each is None else str(each) for each in spreads)])
                if any(name in size.published for size in curve.sizes):
                    values = [size.published.get(name) if size else None for size in shown]
                    rows.append([f"published {title}", *map(self._published_cell, values)])
        return Table(("", *map(_nodes, counts)), rows)

    def _published_cell(self, value: float | None) -> str:
        return "-" if value is None else f"{Spread(value, 0)}{' *' if self.differs else ''}"

    def notes(self) -> Iterator[str]:
        yield from (f"{_TITLES[_TIME]}: {clock}" for clock in self.clocks)
        if self.differs and any(curve.source for curve in self.curves):
            hardware = f", and these nodes have {self.hardware or 'unknown hardware'}"
            yield f"* published for {_published()['hardware']}{hardware}"
        sources = dict.fromkeys(curve.source for curve in self.curves if curve.source)
        yield from (f"published by {source}" for source in sources)

    def report(self) -> Report:
        charts = [self._chart()] if self.curves else []
        section = Section("Scaling", [*self.notes()], charts, [self.table()])
        return Report(self.name, [*self.verdict()], None, self.missing, [section])

    def _chart(self) -> Chart:
        counts = self.counts
        series = []
        for curve in self.curves:
            means = {
                size.nodes: size.figures[_SPEED_UP].mean for size in curve.sizes if _SPEED_UP in size.figures
            }
            # NaN is not drawn.
            series.append(
                Series(curve.title or "measured", [(nodes, means.get(nodes, math.nan)) for nodes in counts])
            )
        published = [
            (size.nodes, size.published[_EFFICIENCY] / 100 * size.nodes / counts[0])
            for size in self.curves[0].sizes
            if _EFFICIENCY in size.published
        ]
        ideal = Series("ideal", [(nodes, nodes / counts[0]) for nodes in counts])
        more = [Series("published", published)] if len(published) > 1 else []
        lines = [*series, ideal, *more]
        # All lines begin at 1.
        rest = with_covers([replace(line, points=line.points[1:]) for line in lines])
        named = [
            replace(line, points=[(str(x), y) for x, y in line.points], covers=later.covers)
            for line, later in zip(lines, rest, strict=True)
        ]
        return Chart("Speed-up", named, "nodes", from_zero=True)


def _places(value: float, digits: int) -> int:
    """Return the decimal places that show a number with this many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def _nodes(count: int) -> str:
    return f"{count} node{'s'[: count != 1]}"


def is_scaling(rows: Sequence[Row]) -> bool:
    """Return whether several runs are those of the same scaling."""
    return len(rows) > 1 and all(row.run.scaling for row in rows) and len({row.run.name for row in rows}) == 1


def scaling_report(rows: Sequence[Row]) -> Report | None:
    """Return the report of a scaling; None if the runs are not those of the same scaling."""
    return scaling_of(rows).report() if is_scaling(rows) else None


def scaling_of(rows: Sequence[Row]) -> Scaling:
    """Return the scaling with these runs. Raises UsageError if no run has the metric of the scaling."""
    options = rows[0].run.scaling or {}
    parts = [part for row in rows for part in (row.tasks or [row])]
    done = [part for part in parts if part.record.state == JobState.COMPLETED and part.record.nodes]
    missing = [f"{part.shown}: {part.record.state}" for part in parts if part not in done]
    damaged = runs_of_scaling(rows[0].run.name, {row.run.directory.parent for row in rows})[1]
    missing += [f"{path.name}: its run.json can't be read" for path in damaged]
    expected = len(options.get("nodes", ())) * options.get("repeats", 1)
    if (count := expected - len(rows) - len(damaged)) > 0:
        missing.append(f"{count} run{'s are' if count > 1 else ' is'} not collected")
    metric = options.get("metric")
    if metric is not None:
        reject_unknown_keys(done, [metric], as_metrics=True)
    else:
        metric = next((name for name in SPEEDS if any(name in part.metrics for part in done)), _TIME)
    goal = Goal.MIN if metric == _TIME else goal_of(metric)
    if metric == options.get("metric") and options.get("goal") in {*Goal}:
        goal = Goal(str(options["goal"]))
    if goal is None:
        missing.append(
            f"the speed-up: it is not known whether lower or higher values of {metric} are faster, which "
            "`submit --goal min` or `--goal max` tells"
        )
    facts = [_Facts.of(part, metric) for part in done]
    missing += [f"{each.row.shown}: no {metric} was recorded" for each in facts if metric not in each.figures]
    titles = dict.fromkeys(each.title for each in facts)
    is_weak = bool(options.get("weak"))
    curves = [
        _curve(title, [each for each in facts if each.title == title], metric, goal, is_weak=is_weak)
        for title in titles
    ]
    hardware = "; ".join(dict.fromkeys(filter(None, (each.hardware for each in facts))))
    return Scaling(
        rows[0].run.name,
        is_weak,
        metric,
        goal,
        curves,
        any(row.run.shares_machine for row in rows),
        hardware,
        any(_published()["hardware"] not in gpu for each in facts for gpu in each.gpus or [""]),
        missing,
        [*dict.fromkeys(each.clock for each in facts if _TIME in each.figures)],
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """A completed run. figures: by name. clock: how its time was measured. gpus: the name of each GPU."""

    row: Row
    title: str
    ranks: int
    figures: Mapping[str, float]
    clock: str
    hardware: str
    gpus: Sequence[str]

    @classmethod
    def of(cls, row: Row, metric: str) -> _Facts:
        environment: Mapping[str, Any] = {}
        with suppress(CollectError):
            environment = environment_of(row)
        job, hosts = mapping(environment, "client", "job"), [*mapping(environment, "hosts").values()]
        listed = [host.get("gpus") for host in hosts if isinstance(host, Mapping)]
        gpus = [str(mapping(gpu).get("name")) for each in listed if isinstance(each, list) for gpu in each]
        keys = (row.run.sweep or {}).get("keys") or []
        metrics = ProgramMetrics.of(row, metric)
        seconds, clock = _seconds(row, metrics)
        return cls(
            row,
            " ".join(f"{key}={row.value(key)}" for key in keys),
            _ranks(row, job.get("tasks_per_node")),
            _figures(row, metrics, metric, seconds),
            clock,
            str(hardware_of(environment).get("nodes", "")),
            gpus,
        )


def _ranks(row: Row, per_node: object) -> int:
    """Return the number of ranks by the lines of the job's script, which may be the user's own.

    per_node: the ranks per node in the job's options, which count without a scheduler.
    """
    directives, script = Directives(""), row.run.directory / "job.sbatch"
    with suppress(OSError, UsageError):
        directives = Directives.read(script, script.read_text(errors="replace").splitlines())
    counts = {
        request.option.name: int(request.value)
        for request in directives.requests
        if request.option is not None and request.value is not None and request.value.isdecimal()
    }
    in_options = per_node if isinstance(per_node, int) else 1
    in_script = counts.get("ntasks-per-node", counts.get("tasks-per-node", in_options))
    return counts.get("ntasks", len(row.record.nodes) * in_script)


def _seconds(row: Row, metrics: ProgramMetrics) -> tuple[float | None, str]:
    """Return how long the program ran, and how that was measured."""
    # A restarted program knows only the time since its last start.
    if metrics.seconds and sum(len(task.known_attempts) for task in row.task_records) <= 1:
        return metrics.seconds, "the program measured its own time"
    if "iteration_ms" in row.metrics:
        return None, ""
    if seconds := program_seconds(events_in(row.folder)):
        return seconds, "the job recorded when its program started and ended"
    return finite(row.value("elapsed")), "the scheduler has the job's time in whole seconds"


def _figures(row: Row, metrics: ProgramMetrics, metric: str, seconds: float | None) -> dict[str, float]:
    """Return the figures of a run, in the order of the table. The program may have recorded few of them."""

    def measured(name: str, key: str) -> float | None:
        median = metrics.median(name)
        return finite(row.value(f"metric.{key}")) if median is None else median

    step, exposed = measured(STEP, "iteration_ms"), measured(EXPOSED, EXPOSED)
    figures = {_TIME: seconds, _STEP: step, metric: seconds if metric == _TIME else measured(metric, metric)}
    figures |= {"comm_exposed_percent": 100 * exposed / step if exposed is not None and step else None}
    usual = [name for name in metric_names([row]) if is_usual(name)]
    for word in _CONVERGENCE:
        figures |= {name: row.metrics[name].last for name in [name for name in usual if word in name][:1]}
    began, ended, span = metrics.began, metrics.ended, None
    if began is not None and ended is not None and row.record.start_time is not None:
        span = began, ended
    figures |= node_use(row.folder, row.record.nodes, span)
    joules = row.record.gpu_energy_j
    figures["energy_kj"] = None if joules is None else joules / 1000
    return {name: value for name, value in figures.items() if value is not None}


def _curve(title: str, facts: Sequence[_Facts], metric: str, goal: Goal | None, *, is_weak: bool) -> Curve:
    counts = sorted({len(each.row.record.nodes) for each in facts})
    groups = {count: [each for each in facts if len(each.row.record.nodes) == count] for count in counts}
    first = counts[0]
    base = [speed for each in groups[first] if (speed := _speed(each, metric, goal))]
    target = _target(str(facts[0].row.value("config.model") or ""))
    sizes = []
    for count, group in groups.items():
        names = dict.fromkeys(name for each in group for name in each.figures)
        figures = {name: Spread.of([f.figures[name] for f in group if name in f.figures]) for name in names}
        if base and (speeds := [speed for each in group if (speed := _speed(each, metric, goal))]):
            ratios = [speed / statistics.fmean(base) for speed in speeds]
            # A throughput, and the time of a sample, count the larger work already.
            is_of_all_work = goal is Goal.MIN and is_time_of_all_work(metric)
            grown = count / first if is_weak and is_of_all_work else 1.0
            speed_up = Spread.of([ratio * grown for ratio in ratios])
            figures |= {_SPEED_UP: speed_up, _EFFICIENCY: speed_up.times(100 * first / count)}
        published = _published_figures(target, metric, groups[first][0].ranks, group[0].ranks)
        sizes.append(Size(count, group[0].ranks, len(group), _in_order(figures, metric), published))
    return Curve(title, sizes, target["source"] if any(size.published for size in sizes) else "")


def _speed(facts: _Facts, metric: str, goal: Goal | None) -> float:
    """Return the speed of a run, the reciprocal of a time.

    0: the metric is missing, 0 or below, or its goal is not known.
    """
    value = max(facts.figures.get(metric, 0.0), 0.0) if goal is not None else 0.0
    return value if goal is Goal.MAX or not value else 1 / value


def _in_order(figures: Mapping[str, Spread], metric: str) -> dict[str, Spread]:
    first = [name for name in (_TIME, _STEP, metric, _SPEED_UP, _EFFICIENCY) if name in figures]
    return {name: figures[name] for name in dict.fromkeys((*first, *figures))}


@cache
def _published() -> Mapping[str, Any]:
    return tomllib.loads(_PUBLISHED.read_text(encoding="utf-8"))


def _target(model: str) -> Mapping[str, Any]:
    targets: list[Mapping[str, Any]] = _published()["targets"]
    return next((target for target in targets if model in target["models"]), targets[-1])


def _published_figures(target: Mapping[str, Any], metric: str, first: int, ranks: int) -> dict[str, float]:
    """Return the published figures for a GPU per rank. They are of trainings, so a throughput is needed.

    first: the ranks on the smallest number of nodes.
    """
    throughput = target["throughput"] if metric.endswith("_per_s") else {}
    if str(first) not in throughput or str(ranks) not in throughput:
        return {}
    speed_up = throughput[str(ranks)] / throughput[str(first)]
    figures = {_EFFICIENCY: 100 * speed_up * first / ranks, "gpu_percent": _published()["gpu_percent"]}
    return figures | ({metric: throughput[str(ranks)]} if target["models"] and metric == SPEEDS[0] else {})
