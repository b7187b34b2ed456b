"""The table and the picture of a scaling: the runs of `submit --scaling` of each size.

A size is a number of nodes, of tasks per node or of GPUs per node. A figure of a size is the mean
over its runs, with the sample standard deviation. The speed-up of a size is the
ratio of its mean to that of the smallest size, so that the rows of the table agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from clusterctl.errors import BadValueError, CollectError, UsageError
from clusterctl.runs.charts import EXPOSED, PARTS, ProgramMetrics, with_covers
from clusterctl.runs.compare import environment_of, hardware_of, mapping
from clusterctl.runs.curve import STEP
from clusterctl.runs.facts import SPEEDS
from clusterctl.runs.find import (
    Row,
    is_usual,
    metric_names,
    reject_unknown_keys,
    runs_of_scaling,
    swept_keys,
)
from clusterctl.runs.metric_files import MetricFiles
from clusterctl.runs.page import Chart, Report, Section, Series, Table
from clusterctl.runs.series import history_in
from clusterctl.runs.spread import Spread, mean_of
from clusterctl.runs.table import stored
from clusterctl.runs.telemetry import node_use
from clusterctl.runs.telemetry_files import FIGURES
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.request.directives import Directives
from clusterctl.spec.metrics import Goal, Target, goal_of
from clusterctl.spec.sweep import SIZE_FIELDS
from clusterctl.spec.units import GIB_MIB
from clusterctl.util import formatting
from clusterctl.util.numbers import finite

_TIME: Final = "time_s"
_STEP: Final = "step_ms"
_SPEED_UP: Final = "speed_up"
_EFFICIENCY: Final = "efficiency_percent"
_TIME_SPEED_UP: Final = "time_speed_up"
_TARGET: Final = "target_s"
_GPU: Final = "gpu_percent"
_GPU_IDLE: Final = "gpu_idle_percent"
_PER_JOULE: Final = "samples_per_joule"
# What `bench` measures on all of its ranks. Telemetry has only the mean over all that it compares.
_OF_BENCH: Final = {
    _GPU: "gpu_active_percent",
    _GPU_IDLE: _GPU_IDLE,
    "gpu_tensor_percent": "gpu_tensor_percent",
    "gpu_bandwidth_percent": "gpu_bandwidth_percent",
    _PER_JOULE: _PER_JOULE,
}
# The titles of figures in the table. Other figures are metrics, with names of their own.
_TITLES: Final = {
    _TIME: "time, s",
    _STEP: "step, ms",
    _SPEED_UP: "speed-up",
    _EFFICIENCY: "efficiency, %",
    _TIME_SPEED_UP: "speed-up by the time",
    "comm_exposed_percent": "exposed communication, % of a step",
    **{figure.key: f"{figure.heading}, {figure.key_unit}" for figure in FIGURES if figure.key},
    _GPU_IDLE: "GPU idle (mean), %",
    "energy_kj": "GPU energy, kJ",
    _PER_JOULE: "samples per joule of the GPUs",
    "node_hours": "node hours",
    "cost_usd": "cost, USD",
}
# Words in the names of metrics: the first metric with each word is in the table.
_CONVERGENCE: Final = ("loss", "acc")
_PERPLEXITY: Final = (
    "eval_perplexity",
    "val_perplexity",
    "perplexity",
    "eval_ppl",
    "val_ppl",
    "ppl",
)
# The word for a single unit of a size, and for several units.
_UNITS: Final = {"nodes": ("node", "nodes"), "tasks": ("task", "tasks"), "gpus": ("GPU", "GPUs")}
# A size pays if at least this share of what was added turns into speed.
_PAYS: Final = 0.5
_ENOUGH: Final = 3  # sizes, to say up to where more of them pay
_DASHED: Final = (7, 5)


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """The completed runs of a size. figures: by name."""

    size: int
    nodes: int
    ranks: int
    runs: int
    figures: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """A program with its options, in each size. title: the options that a sweep sets, or ""."""

    title: str
    sizes: Sequence[ScalingRow]


@dataclass(frozen=True, slots=True)
class ScalingTable:
    """The scaling of a program. name: of its jobs. metric: the figure that measures the speed.

    by: what the sizes count: nodes, tasks or gpus (per node).
    goal: whether lower or higher values of the metric are faster; None if it is not known.
    shares_machine: whether nodes are containers of the same machine. hardware: that of the nodes.
    missing: runs and figures that are left out. clocks: how the times were measured.
    target: the value of a metric to which the time is measured; "" if none.
    """

    name: str
    by: str
    weak: bool
    metric: str
    goal: Goal | None
    curves: Sequence[ScalingCurve]
    shares_machine: bool
    hardware: str
    missing: Sequence[str]
    clocks: Sequence[str] = ()
    target: str = ""

    @property
    def sizes(self) -> list[int]:
        """The sizes of all curves, in ascending order."""
        return sorted({size.size for curve in self.curves for size in curve.sizes})

    def verdict(self) -> Iterator[str]:
        is_across = any(size.nodes > 1 for curve in self.curves for size in curve.sizes)
        if self.shares_machine and is_across:
            yield (
                "nodes share a machine and its cores: this speed-up and efficiency say nothing "
                "about separate machines"
            )
        elif self.shares_machine:
            yield "nodes share a machine: what runs on its other nodes may slow this scaling"
        for curve in self.curves:
            name = f"{curve.title}: " if curve.title else ""
            sentences = [*self._speed_lines(curve)]
            if not (self.shares_machine and is_across):
                sentences += [*self._paying(curve)]
            yield from (f"{name}{text}" for text in (*sentences, *self._convergence(curve)))

    def _speed_lines(self, curve: ScalingCurve) -> Iterator[str]:
        first = curve.sizes[0]
        last = curve.sizes[-1]
        if _SPEED_UP not in last.figures or last is first:
            return
        speed_up = last.figures[_SPEED_UP]
        efficiency = last.figures[_EFFICIENCY]
        times = "" if str(speed_up) == "1" else f"{speed_up} times "
        faster = f"{times}as fast as on {self._named(first)}"
        slower = f"slower than on {self._named(first)}, speed-up {speed_up}"
        kind = "weak" if self.weak else "strong"
        yield (
            f"{kind} scaling by {self._title(self.metric)}: on {self._named(last)} "
            f"{slower if speed_up.mean < 1 else faster}, efficiency {efficiency} %"
        )

    @property
    def _direction(self) -> str:
        """The direction of the metric as text; "" for the time, whose direction nobody doubts."""
        return "" if self.goal is None or self.metric == _TIME else f" ({self.goal.words})"

    def _paying(self, curve: ScalingCurve) -> Iterator[str]:
        """Yield a sentence on the size from which more does not pay, if the figures are clear
        enough.
        """
        sizes = [size for size in curve.sizes if _SPEED_UP in size.figures]
        single = "" if all(size.runs > 1 for size in sizes) else " (a single run of a size)"
        for at, (before, size) in enumerate(pairwise(sizes), 1):
            was = before.figures[_SPEED_UP]
            is_now = size.figures[_SPEED_UP]
            ratio = is_now.mean / was.mean
            least = 1 + _PAYS * (size.size / before.size - 1)
            error = ratio * math.hypot(was.error / was.mean, is_now.error / is_now.mean)
            if abs(ratio - least) < 2 * error:
                yield f"whether {self._named(size)} pay can't be told from the spread of the runs"
                return
            if ratio < least:
                efficiencies = [each.figures[_EFFICIENCY].mean for each in sizes[at:]]
                # A later size that is better would contradict the sentence.
                if max(efficiencies) == efficiencies[0]:
                    yield (
                        f"stops paying at {self._named(size)}: efficiency "
                        f"{size.figures[_EFFICIENCY]} %, {ratio:.2f} times the speed on "
                        f"{self._named(before)}{single}"
                    )
                return
        if len(sizes) >= _ENOUGH:
            last = sizes[-1]
            efficiency = last.figures[_EFFICIENCY]
            yield (
                f"pays up to {self._named(last)}, the most that ran: efficiency {efficiency} "
                f"%{single}"
            )

    def _convergence(self, curve: ScalingCurve) -> Iterator[str]:
        """Yield for the loss and the accuracy whether they differ between the sizes."""
        first, *others = curve.sizes
        for key in first.figures:
            base = first.figures[key]
            compared = [(size, size.figures[key]) for size in others if key in size.figures]
            if not compared or not (is_usual(key) or key in _PERPLEXITY):
                continue
            verdicts = [value.differs_from(base) for _, value in compared]
            on_first = f"{base} on {self._named(first)}"
            rest = ", ".join(f"{value} on {self._named(size)}" for size, value in compared)
            if True in verdicts:
                different = [
                    f"{value} on {self._named(size)}"
                    for (size, value), differs in zip(compared, verdicts, strict=True)
                    if differs
                ]
                yield (
                    f"{key}: different, by more than the spread: {on_first}, {', '.join(different)}"
                )
            elif None in verdicts:
                why = (
                    "with a single run"
                    if min(v.count for _, v in compared) == 1
                    else "without a spread"
                )
                yield f"{key}: {on_first}, {rest}; {why} it can't be judged whether that differs"
            else:
                have_spread = all(
                    each.deviation for each in (base, *(value for _, value in compared))
                )
                how = "within the spread of the runs" if have_spread else "in four digits"
                yield f"{key}: the same {how}: {on_first}, {rest}"

    def _title(self, name: str) -> str:
        if name == _TARGET:
            return f"time to {self.target}, s"
        return _TITLES.get(name, name) + (self._direction if name == self.metric else "")

    def _counted(self, size: int) -> str:
        """Return a text such as ``2 nodes``, ``1 task``."""
        return f"{size} {_UNITS[self.by][size != 1]}"

    def _named(self, size: ScalingRow) -> str:
        """Return a text such as ``2 nodes``, or ``4 tasks on each of 2 nodes``."""
        text = self._counted(size.size)
        return (
            text
            if self.by == "nodes" or size.nodes == 1
            else f"{text} on each of {size.nodes} nodes"
        )

    def table(self) -> Table:
        """Return the table: a column for each size, a row for each figure of each curve."""
        counts = self.sizes
        rows: list[Sequence[str]] = []
        for curve in self.curves:
            sizes = {size.size: size for size in curve.sizes}
            shown = [sizes.get(count) for count in counts]
            if curve.title:
                rows.append([curve.title, *("" for _ in counts)])
            rows += [
                [key, *("-" if size is None else str(getattr(size, key)) for size in shown)]
                for key in (*(("nodes",) if self.by != "nodes" else ()), "ranks", "runs")
            ]
            for name in dict.fromkeys(name for size in curve.sizes for name in size.figures):
                title = self._title(name)
                spreads = [size.figures.get(name) if size else None for size in shown]
                if title.endswith("GiB") and all(each is None or each.mean < 1 for each in spreads):
                    title = f"{title.removesuffix('GiB')}MiB"
                    spreads = [each and each.times(GIB_MIB) for each in spreads]
                rows.append([title, *("-" if each is None else str(each) for each in spreads)])
        return Table(("", *map(self._counted, counts)), rows)

    def notes(self) -> Iterator[str]:
        yield from (f"{_TITLES[_TIME]}: {clock}" for clock in self.clocks)
        if any(_TARGET in size.figures for curve in self.curves for size in curve.sizes):
            yield f"{self._title(_TARGET)}: from the start of the program, with its start-up"

    def report(self) -> Report:
        charts = [self._chart()] if self.curves else []
        section = Section("Scaling", [*self.notes()], charts, [self.table()])
        return Report(self.name, [*self.verdict()], None, self.missing, [section])

    def _chart(self) -> Chart:
        """Return the chart of the speed-up. Both axes are linear, so that the ideal is a straight
        line.
        """
        counts = self.sizes
        series = []
        for curve in self.curves:
            drawn = [size for size in curve.sizes if _SPEED_UP in size.figures]
            spreads = [size.figures[_SPEED_UP] for size in drawn]
            points = [(size.size, each.mean) for size, each in zip(drawn, spreads, strict=True)]
            errors = (
                [each.ends for each in spreads] if any(each.deviation for each in spreads) else []
            )
            series.append(Series(curve.title or "measured", points, errors=errors))
        # All lines begin at 1.
        rest = with_covers([replace(line, points=line.points[1:]) for line in series])
        series = [
            replace(line, covers=later.covers) for line, later in zip(series, rest, strict=True)
        ]
        first = counts[0]
        ideal = Series("ideal", [(size, size / first) for size in counts], -1, dash=_DASHED)
        lines = [*series, ideal]
        units = _UNITS[self.by][1] + ("" if self.by == "nodes" else " per node")
        end = float(counts[-1])
        return Chart("Speed-up", lines, units, from_zero=True, has_points=True, x_end=end)


def is_scaling(rows: Sequence[Row]) -> bool:
    """Return whether several runs are those of the same scaling."""
    return (
        len(rows) > 1
        and all(row.run.scaling for row in rows)
        and len({row.run.name for row in rows}) == 1
    )


def scaling_report(rows: Sequence[Row]) -> Report | None:
    """Return the report of a scaling; None if the runs are not those of the same scaling."""
    return scaling_of(rows).report() if is_scaling(rows) else None


def scaling_of(rows: Sequence[Row]) -> ScalingTable:
    """Return the scaling with these runs. Raises UsageError if no run has the metric of the
    scaling.
    """
    options: Mapping[str, Any] = rows[0].run.scaling or {}
    by = next((name for name in SIZE_FIELDS if options.get(name)), "nodes")
    parts = [part for row in rows for part in (row.tasks or [row])]
    done = [part for part in parts if part.record.state == JobState.COMPLETED and part.record.nodes]
    metric = _metric_of(options, done)
    goal = _goal_of(options, metric)
    target = _target_of(options.get("time_to"))
    facts = [_Facts.of(part, by, metric, target) for part in done]
    by_curve: dict[str, list[_Facts]] = {}
    for each in facts:
        by_curve.setdefault(each.title, []).append(each)
    is_weak = bool(options.get("weak"))
    curves = [
        _curve(title, of_curve, metric, goal, is_weak=is_weak)
        for title, of_curve in by_curve.items()
    ]
    missing = [f"{part.shown}: {part.record.state}" for part in parts if part not in done]
    missing += _uncollected(rows, options, by)
    missing += [f"{part.shown}: {text}" for part in done for text in part.record.left_out]
    missing += _unusable_figures(facts, metric, goal)
    for of_curve in by_curve.values():
        missing += _in_part(of_curve, metric, by)
    hardware = "; ".join(dict.fromkeys(filter(None, (each.hardware for each in facts))))
    return ScalingTable(
        rows[0].run.name,
        by,
        is_weak,
        metric,
        goal,
        curves,
        any(row.run.shares_machine for row in rows),
        hardware,
        missing,
        [*dict.fromkeys(each.clock for each in facts if _TIME in each.figures)],
        "" if target is None else str(target),
    )


def _metric_of(options: Mapping[str, Any], done: Sequence[Row]) -> str:
    """Return the metric of a scaling. Default: a usual metric of speed, or the time.

    done: the runs that completed. Raises UsageError if none of them has the metric in ``options``.
    """
    metric: str | None = options.get("metric")
    if metric is not None:
        reject_unknown_keys(done, [metric], as_metrics=True)
        return metric
    return next((name for name in SPEEDS if any(name in part.metrics for part in done)), _TIME)


def _goal_of(options: Mapping[str, Any], metric: str) -> Goal | None:
    """Return whether the lowest or the highest value of the metric is best, if that is known."""
    # Another version of clusterctl may have written the record.
    if metric == options.get("metric") and options.get("goal") in {*Goal}:
        return Goal(str(options["goal"]))
    return Goal.MIN if metric == _TIME else goal_of(metric)


def _uncollected(rows: Sequence[Row], options: Mapping[str, Any], by: str) -> Iterator[str]:
    """Yield the runs of a scaling that can't be read or are not collected."""
    damaged = runs_of_scaling(rows[0].run.name, {row.run.directory.parent for row in rows})[1]
    for path in damaged:
        yield f"{path.name}: its run.json can't be read"
    expected = len(options.get(by) or ()) * options.get("repeats", 1)
    count = expected - len(rows) - len(damaged)
    if count > 0:
        yield f"{count} run{'s are' if count > 1 else ' is'} not collected"


def _unusable_figures(facts: Sequence[_Facts], metric: str, goal: Goal | None) -> Iterator[str]:
    """Yield the figures without which there is no speed-up or no time to the target."""
    if goal is None:
        yield (
            f"the speed-up: it is not known whether lower or higher values of {metric} are "
            "faster, which `submit --set scaling.goal=min` or `max` tells"
        )
    for each in facts:
        if metric not in each.figures:
            yield f"{each.row.shown}: no {metric} was recorded"
    for each in facts:
        if goal is not None and each.figures.get(metric, 1.0) <= 0:
            yield (
                f"{each.row.shown}: {metric} is {formatting.metric(each.figures[metric], metric)}, "
                "of which no speed-up can be computed"
            )
    for each in facts:
        if each.not_timed:
            yield f"{each.row.shown}: {each.not_timed}"


def _target_of(text: object) -> Target | None:
    # Another version of clusterctl may have written the record.
    with suppress(BadValueError):
        return Target.of(text) if isinstance(text, str) else None
    return None


@dataclass(frozen=True, slots=True)
class _Facts:
    """A completed run. figures: by name. clock: how its time was measured.

    size: the number of nodes, tasks or GPUs. not_timed: why the time to the target is not known.
    """

    row: Row
    title: str
    size: int
    ranks: int
    figures: Mapping[str, float]
    clock: str
    hardware: str
    not_timed: str

    @classmethod
    def of(cls, row: Row, by: str, metric: str, target: Target | None) -> _Facts:
        environment: Mapping[str, Any] = {}
        with suppress(CollectError):
            environment = environment_of(row)
        job = mapping(environment, "client", "job")
        keys = swept_keys(row)
        metrics = ProgramMetrics.of(row, metric)
        seconds, clock = _seconds(row, metrics)
        figures = _figures(row, metrics, metric, seconds)
        to_target, not_timed = (None, "") if target is None else _seconds_to(row, target, metrics)
        if to_target is not None:
            figures[_TARGET] = to_target
        requested = job.get(SIZE_FIELDS[by])
        nodes = len(row.record.nodes)
        return cls(
            row,
            " ".join(f"{key}={row.text(key)}" for key in keys),
            requested if by != "nodes" and isinstance(requested, int) else nodes,
            _ranks(row, job.get("tasks_per_node")),
            figures,
            clock,
            str(hardware_of(environment).get("nodes", "")),
            not_timed,
        )


def _ranks(row: Row, per_node: object) -> int:
    """Return the number of ranks by the lines of the job's script, which may be the user's own.

    per_node: the ranks per node in the job's options, which count without a scheduler.
    """
    directives = Directives("")
    script = row.run.directory / "job.sbatch"
    with suppress(OSError, UsageError):
        directives = Directives.read(script, script.read_text(errors="replace").splitlines())
    counts = {
        one.option.name: int(one.value)
        for one in directives.options
        if one.option is not None and one.value is not None and one.value.isdecimal()
    }
    in_options = per_node if isinstance(per_node, int) else 1
    in_script = counts.get("ntasks-per-node", counts.get("tasks-per-node", in_options))
    return counts.get("ntasks", len(row.record.nodes) * in_script)


def _seconds(row: Row, metrics: ProgramMetrics) -> tuple[float | None, str]:
    """Return how long the program ran, and how that was measured."""
    # A restarted program knows only the time since its last start.
    if metrics.seconds and sum(len(task.attempts) for task in row.task_records) <= 1:
        return metrics.seconds, "the program measured its own time"
    if "iteration_ms" in row.metrics:
        return None, ""
    spans = [(each.started or 0.0, each.ended) for each in history_in(row.folder) if each.start]
    seconds = [ended - started for started, ended in spans if ended is not None]
    if seconds and len(seconds) == len(spans):
        stopped = sum(each.suspended_s for task in row.task_records for each in task.attempts)
        return max(
            0.0, sum(seconds) - stopped
        ), "the job recorded when its program started and ended"
    return finite(row.value("elapsed")), "the scheduler has the job's time in whole seconds"


def _seconds_to(row: Row, target: Target, metrics: ProgramMetrics) -> tuple[float | None, str]:
    """Return the time from the program's start to the first value that reaches a target, or why
    not.

    The time between the attempts of a restarted job does not count.
    """
    started = history_in(row.folder)[0].started
    start = row.record.start_time if started is None else started
    is_recorded = False
    for block in stored(MetricFiles(row.folder)):
        if (column := block.columns.get(target.metric)) is None:
            continue
        is_recorded = True
        for at, value in enumerate(column.ys):
            if target.is_reached(value):
                time = column.times[at] if column.times is not None else None
                if time is None or start is None or not metrics.has_clock:
                    return None, f"the lines with {target.metric} have no time"
                paused = sum(max(0.0, min(time, end) - begin) for begin, end in row.pauses)
                return max(0.0, time - start - paused), ""
    return None, f"{target} was not reached" if is_recorded else f"no {target.metric} was recorded"


def _figures(
    row: Row, metrics: ProgramMetrics, metric: str, seconds: float | None
) -> dict[str, float]:
    """Return the figures of a run, in the order of the table. The program may have recorded few of
    them.
    """

    def measured(name: str, key: str) -> float | None:
        median = metrics.median(name)
        return finite(row.value(f"metric.{key}")) if median is None else median

    figures = {
        _TIME: seconds,
        _STEP: measured(STEP, "iteration_ms"),
        metric: seconds if metric == _TIME else measured(metric, metric),
    }
    figures |= {"comm_exposed_percent": _exposed_percent(row, metrics)}
    usual = [name for name in metric_names([row]) if is_usual(name)]
    for word in _CONVERGENCE:
        figures |= {
            name: row.metrics[name].last for name in [name for name in usual if word in name][:1]
        }
    for name in [name for name in _PERPLEXITY if name in row.metrics][:1]:
        figures |= {name: row.metrics[name].last}
    began = metrics.began
    ended = metrics.ended
    span = None
    if began is not None and ended is not None and row.record.start_time is not None:
        span = began, ended
    figures |= node_use(row.folder, row.record.nodes, span)
    if (percent := figures.get(_GPU)) is not None:
        figures[_GPU_IDLE] = 100 - percent
    if "iteration_ms" in row.metrics:
        figures |= {
            key: value
            for key, name in _OF_BENCH.items()
            if (value := finite(row.value(f"metric.{name}"))) is not None
        }
    record = row.record
    run = row.run
    joules = record.gpu_energy_j
    figures["energy_kj"] = None if joules is None else joules / 1000
    # The energy is that of all attempts; after a restart, some samples were computed twice.
    is_whole = sum(len(task.attempts) for task in row.task_records) <= 1
    if is_whole and not metrics.left_out and joules and (samples := finite(metrics.samples_done)):
        figures[_PER_JOULE] = samples / joules
    figures["node_hours"] = record.node_hours or None
    figures["cost_usd"] = run.cost_usd if row.task is None else None
    if row.task is not None and run.price_per_hour is not None:
        figures["cost_usd"] = run.price_per_hour * record.node_hours
    return {name: value for name, value in figures.items() if value is not None}


def _exposed_percent(row: Row, metrics: ProgramMetrics) -> float | None:
    """Return the share of the exposed communication in the time of all steps, or in that of
    `bench`.
    """
    means = dict(zip(PARTS, metrics.part_means, strict=False))
    if len(means) == len(PARTS) and (total := sum(means.values())) > 0:
        return 100 * means[PARTS[1]] / total
    step, exposed = (finite(row.value(f"metric.{key}")) for key in ("iteration_ms", EXPOSED))
    return 100 * exposed / step if exposed is not None and step else None


def _in_part(facts: Sequence[_Facts], metric: str, by: str) -> Iterator[str]:
    """Yield the figures that only some runs of a size have, and which the table therefore omits."""
    for size, group in _by_size(facts).items():
        names = dict.fromkeys(name for each in group for name in each.figures)
        for name in (name for name in names if name not in (metric, _TIME, _TARGET)):
            count = sum(name in each.figures for each in group)
            if count < len(group):
                title = _TITLES.get(name, name)
                unit = _UNITS[by][size != 1]
                yield f"{title} of {size} {unit}: only {count} of {len(group)} runs have it"


def _by_size(facts: Sequence[_Facts]) -> Mapping[int, Sequence[_Facts]]:
    return {
        size: [each for each in facts if each.size == size]
        for size in sorted({each.size for each in facts})
    }


def _curve(
    title: str, facts: Sequence[_Facts], metric: str, goal: Goal | None, *, is_weak: bool
) -> ScalingCurve:
    groups = _by_size(facts)
    first = next(iter(groups))
    base = _measured(groups[first], metric)
    sizes = []
    for size, group in groups.items():
        names = dict.fromkeys(name for each in group for name in each.figures)
        values = {
            name: [each.figures[name] for each in group if name in each.figures] for name in names
        }
        # A mean of some runs alone would be a figure from a part. Runs without the metric are
        # named.
        figures = {
            name: Spread.of(listed)
            for name, listed in values.items()
            if len(listed) == len(group) or name in (metric, _TIME)
        }
        own = _measured(group, metric)
        if base and own and goal is not None:
            # A throughput, and the time of a single sample, already count the larger work.
            is_of_all_work = goal is Goal.MIN and "_per_" not in metric
            grown = size / first if is_weak and is_of_all_work else 1.0
            speed_up = _speed_up(base, own, goal).times(grown)
            figures |= {_SPEED_UP: speed_up, _EFFICIENCY: speed_up.times(100 * first / size)}
        if metric != _TIME and (by_time := _by_time(groups[first], group)) is not None:
            figures[_TIME_SPEED_UP] = by_time.times(size / first if is_weak else 1.0)
        nodes = len(group[0].row.record.nodes)
        in_order = _in_order(figures, metric)
        sizes.append(ScalingRow(size, nodes, group[0].ranks, len(group), in_order))
    return ScalingCurve(title, sizes)


def _by_time(first: Sequence[_Facts], group: Sequence[_Facts]) -> Spread | None:
    """Return the speed-up by the times of the runs; None if a time is missing or was measured
    otherwise.
    """
    times = [each.figures.get(_TIME, 0.0) for each in (*first, *group)]
    if min(times) <= 0 or len({each.clock for each in (*first, *group)}) > 1:
        return None
    return _speed_up(times[: len(first)], times[len(first) :], Goal.MIN)


def _speed_up(first: Sequence[float], values: Sequence[float], goal: Goal) -> Spread:
    """Return the ratio of two means as a speed-up, with the deviation of the runs' own ratios."""
    base, mean = mean_of(first), mean_of(values)
    is_time = goal is Goal.MIN
    runs = Spread.of([base / value if is_time else value / base for value in values])
    return Spread(base / mean if is_time else mean / base, runs.deviation, len(values))


def _measured(facts: Sequence[_Facts], metric: str) -> list[float]:
    """Return the values of a metric above 0, of which a speed-up can be computed."""
    return [value for each in facts if (value := each.figures.get(metric, 0.0)) > 0]


def _in_order(figures: Mapping[str, Spread], metric: str) -> dict[str, Spread]:
    order = (_TIME, _TARGET, _STEP, metric, _SPEED_UP, _EFFICIENCY, _TIME_SPEED_UP)
    first = [name for name in order if name in figures]
    return {name: figures[name] for name in dict.fromkeys((*first, *figures))}
