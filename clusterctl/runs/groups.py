"""Groups of runs whose options are equal but for their seed, with the mean of each metric.

A run counts if its job has completed and it has not diverged. It has diverged if a metric that is
averaged, or a usual one such as ``loss``, ended as NaN or infinite. Runs that do not count are
named with the reason.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import Notice
from clusterctl.runs.curve import STEP, Curve, Places
from clusterctl.runs.find import (
    FIELDS,
    Row,
    is_usual,
    key_of,
    metric_names,
    metric_of,
    submitted_at,
    swept_keys,
)
from clusterctl.runs.metric_files import MetricFiles
from clusterctl.runs.series import config_of
from clusterctl.runs.spread import Spread
from clusterctl.runs.table import stored
from clusterctl.scheduler.base import JobState
from clusterctl.spec.names import first_few
from clusterctl.state.run_record import Value
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_SEED: Final = re.compile(r"(?:.*[._-])?(?:seed|random_state)", re.IGNORECASE)
# What tells apart runs of the same options.
_PROGRAM: Final = ("name", "nodes", "tasks_per_node")
_WORDS: Final = "arguments"
_MOST_METRICS: Final = 4
_MOST_NAMED: Final = 16


def label(key: str) -> str:
    """Return the name of an option, without ``config.`` unless a field has the name, too."""
    name = key.removeprefix("config.")
    return key if name in FIELDS else name


def is_seed(key: str) -> bool:
    """Return whether an option is a seed by its name, such as ``seed`` or ``data.random_state``."""
    return _SEED.fullmatch(key.removeprefix("config.")) is not None


def how_diverged(row: Row, metric: str) -> str | None:
    """Return how a metric, by its key, ended as NaN or infinite; None if it did not."""
    name = metric_of(metric)
    last = row.nonfinite(name)
    if last is None:
        return None
    recorded = row.metrics[name]
    place = recorded.nonfinite_step
    since = "" if place is None else f", not finite since {recorded.axis} {place}"
    return f"{name} ended as {last}{since}"


@dataclass(frozen=True, slots=True)
class Group:
    """Runs whose options are equal but for the seed.

    options: those in which the groups differ. counted: the runs that count. diverged: those that
        do not, because they diverged. left_out: why each other run does not count, and these.
    """

    options: Mapping[str, Value]
    counted: Sequence[Row]
    diverged: Sequence[Row]
    left_out: Sequence[str]

    @property
    def name(self) -> str:
        """The options as a text such as ``lr=0.1, width=8``; "" if there is a single group."""
        return ", ".join(
            f"{label(key)}={formatting.given(value)}" for key, value in self.options.items()
        )

    def spread(self, metric: str) -> Spread | None:
        """Return the mean of the metric's last values; None if no run that counts has one."""
        values = [row.value(metric) for row in self.counted]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return Spread.of(numbers) if numbers else None

    def text(self, metric: str) -> str:
        """Return mean ± standard deviation; with the number of runs, if not all have the metric."""
        spread = self.spread(metric)
        if spread is None:
            return formatting.NONE
        text = formatting.number(spread.mean)
        if spread.count > 1:
            text = str(spread) if spread.deviation else f"{text} ± 0"
        return text if spread.count == len(self.counted) else f"{text} (n={spread.count})"


@dataclass(slots=True)
class MeanLine:
    """The mean of a metric over the runs of a group that have it, at the steps that all of these
    have. Runs are added one by one, and their curves need not stay in memory.

    count: their number. stride: of very many values, about one of so many is a point.
    """

    group: Group
    count: int = 0
    stride: int = 1
    _spreads: Mapping[float, Spread] = field(default_factory=dict)

    def add(self, curve: Curve) -> None:
        """Add the curve of a run. All have the same axis."""
        values = _by_place(curve)
        self._spreads = (
            {
                step: one.with_value(values[step])
                for step, one in self._spreads.items()
                if step in values
            }
            if self.count
            else {step: Spread(value, 0.0) for step, value in values.items()}
        )
        self.count += 1
        self.stride = max(self.stride, curve.size)

    @property
    def points(self) -> Sequence[tuple[float, Spread]]:
        """Step, and mean and spread: NaN, a gap of the line, if a value was not finite."""
        gap = Spread(math.nan, math.nan, self.count)
        return [
            (step, one if math.isfinite(one.mean) and math.isfinite(one.deviation) else gap)
            for step, one in sorted(self._spreads.items(), key=itemgetter(0))
        ]

    @property
    def legend(self) -> str:
        """The name for a legend, with the number of runs that diverged."""
        diverged = len(self.group.diverged)
        name = self.group.name or counted(self.count, "run")
        return f"{name} ({diverged} diverged)" if diverged else name


def _curve_in(files: MetricFiles, metric: str) -> Curve | None:
    """Return the values of a metric, also by their places; None if there are none."""
    curve = Curve(places=Places())
    for block in stored(files):
        if metric in block.columns:
            curve.extend(block.axis, block.columns[metric])
    return curve if curve.count else None


def _by_place(curve: Curve) -> Mapping[float, float]:
    """Return the last value at each place; of very many places, at the same ones as in other
    curves.
    """
    if curve.places is None or curve.drawn_axis != curve.axis:
        return dict(curve.thin())
    return curve.places.points()


@dataclass(frozen=True, slots=True)
class MeanLines:
    """The lines of groups in a chart. axis: of their steps. left_out: why other runs that count are
    in no line. unread: what was left out when their metrics were read.
    """

    axis: str
    lines: Sequence[MeanLine]
    left_out: Sequence[str]
    unread: Sequence[str]

    @classmethod
    def of(cls, groups: Sequence[Group], metric: str) -> MeanLines:
        """Read a metric of the runs that count, and return its means by the axis that most of them
        have.
        """
        by_axis: list[dict[str, MeanLine]] = []
        axes: dict[Path, str] = {}
        unread: list[str] = []
        for group in groups:
            own: dict[str, MeanLine] = {}
            for row in group.counted:
                files = MetricFiles(row.folder)
                if (curve := _curve_in(files, metric)) is not None:
                    axes[row.folder] = curve.drawn_axis
                    own.setdefault(curve.drawn_axis, MeanLine(group)).add(curve)
                unread += [f"{row.shown}: {text}" for text in files.left_out]
            by_axis.append(own)
        axis = next((name for name, _ in Counter(axes.values()).most_common(1)), STEP)
        lines = []
        left_out = []
        for group, own in zip(groups, by_axis, strict=True):
            for row in group.counted:
                if (of_row := axes.get(row.folder)) is None:
                    left_out.append(f"{row.shown}: it has no {metric} over its steps")
                elif of_row != axis:
                    left_out.append(f"{row.shown}: its {metric} is by {of_row}, not {axis}")
            if (line := own.get(axis)) is not None:
                if line.points:
                    lines.append(line)
                else:
                    left_out.append(f"{line.legend}: its runs have no {axis} in common")
        return cls(axis, lines, left_out, unread)

    def notes(self) -> Iterator[Notice]:
        """Yield each run that counts and is in no line, and what was not read."""
        yield from _notes_of(self.left_out, self.unread)


def _notes_of(left_out: Sequence[str], unread: Sequence[str]) -> Iterator[Notice]:
    for reason in at_most_named(left_out):
        yield Notice("run-not-averaged", f"not in a mean: {reason}")
    for text in at_most_named(unread):
        yield Notice("metrics-not-read", f"not read: {text}")


def at_most_named(reasons: Sequence[str]) -> Sequence[str]:
    """Return the first reasons, and how many more there are."""
    more = len(reasons) - _MOST_NAMED
    return [*reasons[:_MOST_NAMED], f"{more} more"] if more > 0 else reasons


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of some runs. over: the options whose values are averaged. metrics: the keys of
    what is averaged.
    """

    over: Sequence[str]
    metrics: Sequence[str]
    groups: Sequence[Group]

    @property
    def rows(self) -> Sequence[Group]:
        """The groups in which a run counts or diverged. Tables have no others."""
        return [each for each in self.groups if each.counted or each.diverged]

    @property
    def keys(self) -> Sequence[str]:
        """The options in which the groups differ."""
        return [*self.groups[0].options] if self.groups else []

    @property
    def labels(self) -> Sequence[str]:
        """The names of these options, as the heads of columns."""
        return [*map(label, self.keys)]

    @property
    def has_means(self) -> bool:
        """Whether any group has several runs."""
        return any(len(each.counted) + len(each.diverged) > 1 for each in self.groups)

    @property
    def left_out(self) -> list[str]:
        """Why each run that does not count does not."""
        return [reason for each in self.groups for reason in each.left_out]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of a table of means."""
        has_diverged = any(each.diverged for each in self.groups)
        head = [*self.labels, *self.metrics, "n"]
        rows = [
            [
                *map(formatting.given, each.options.values()),
                *map(each.text, self.metrics),
                str(len(each.counted)),
                *([str(len(each.diverged))] if has_diverged else []),
            ]
            for each in self.rows
        ]
        return [*head, *(["diverged"] if has_diverged else [])], rows

    def figures(self) -> tuple[list[str], list[list[Any]]]:
        """Return the head and the rows of the table of means for programs, with all digits."""
        head = [*self.labels]
        head += [title for name in self.metrics for title in (name, f"{name}_sd", f"{name}_n")]
        rows = []
        for each in self.rows:
            spreads = [each.spread(name) for name in self.metrics]
            cells = [
                figure
                for one in spreads
                for figure in ((None, None, 0) if one is None else one.as_dict().values())
            ]
            rows.append([*each.options.values(), *cells, len(each.diverged)])
        return [*head, "diverged"], rows

    def notes(self) -> Iterator[Notice]:
        """Yield what the table means, each run that is in no mean, and what was not read of the
        others.
        """
        over = ", ".join(map(label, self.over))
        if self.has_means:
            yield Notice(
                "means-of-runs", f"mean ± sample standard deviation of n runs, over {over}"
            )
        elif self.over and self.groups:
            differ = first_few(self.labels, _MOST_NAMED)
            also = f": they also differ in {differ}" if differ else ""
            yield Notice(
                "no-runs-to-average", f"no two runs that count differ only in {over}{also}"
            )
        rows = [row for each in self.groups for row in each.counted]
        unread = [f"{row.shown}: {text}" for row in rows for text in row.record.left_out]
        yield from _notes_of(self.left_out, unread)


def grouped(rows: Sequence[Row], over: Sequence[str] = (), metrics: Sequence[str] = ()) -> Groups:
    """Return groups of runs whose options are equal but for ``over``, in the order of the runs.

    over: default: the seeds among the options. metrics: default: the usual ones, or the first. A
        name that an option has, too, is that of the metric.
    """
    recorded = [*metric_names(rows)]
    usual = [key_of(name, rows) for name in recorded if is_usual(name)]
    first = usual or [key_of(name, rows) for name in recorded[:1]]
    metrics = [
        key_of(key, rows) if key in recorded and key not in FIELDS else key for key in metrics
    ] or first[:_MOST_METRICS]
    checked = dict.fromkeys((*metrics, *usual))
    ended = [
        row
        for row in rows
        if row.record.state == JobState.COMPLETED or any(how_diverged(row, key) for key in checked)
    ]
    over = over or [key for key in _differing(rows, rows) if is_seed(key)]
    names = {*map(label, over)}
    keys = [key for key in _differing(rows, ended) if label(key) not in names]
    if not over and len({_options(row, keys) for row in ended}) < len(ended):
        keys = ["run"]
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[_options(row, keys)].append(row)
    return Groups(over, metrics, [_group(each, keys, over, [*checked]) for each in groups.values()])


def _differing(rows: Sequence[Row], ended: Sequence[Row]) -> list[str]:
    """Return the options in which the runs differ; of the tasks of a sweep those that it varies.

    ended: those whose options are compared. A run that failed early may not have told all of its.
    """
    tokens = {row.run.replay_of if row.run.of_failed else row.run.token for row in rows}
    if rows and len(tokens) == 1 and all(row.task for row in rows) and swept_keys(rows[0]):
        keys = swept_keys(rows[0])
        ended = rows
    else:
        options = dict.fromkeys(key for row in ended for key in row.config)
        keys = [*_PROGRAM, _WORDS, *(f"config.{key}" for key in options)]
    return [key for key in keys if len({_options(row, [key]) for row in ended}) > 1]


def _options(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the values of these options of a run, to compare them: 1 and 1.0 differ."""
    return tuple(repr(_option(row, key)) for key in keys)


def _option(row: Row, key: str) -> Value:
    if key == _WORDS:
        return shlex.join(config_of(row.run.args)[1])
    # The record of a run has the nodes of all attempts; that of its task those of the last.
    if key == "nodes" and len(row.task_records) == 1:
        return len(row.task_records[0].nodes)
    return row.value(key)


def _group(
    rows: Sequence[Row], keys: Sequence[str], over: Sequence[str], metrics: Sequence[str]
) -> Group:
    newest: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: submitted_at(row.run)):
        if row.record.state == JobState.COMPLETED:
            newest[_options(row, over)] = row
    counted_rows, diverged, reasons = [], [], []
    for row in rows:
        reason = next(filter(None, (how_diverged(row, name) for name in metrics)), None)
        latest = newest.get(_options(row, over))
        if row.record.state == JobState.COMPLETED and row is not latest and latest is not None:
            reasons.append(
                f"{row.shown}: {latest.shown} has the same {', '.join(map(label, over))}"
            )
        elif reason is not None:
            diverged.append(row)
            reasons.append(f"{row.shown} diverged: {reason}")
        elif row.record.state != JobState.COMPLETED:
            reasons.append(f"{row.shown}: {row.record.state}")
        else:
            counted_rows.append(row)
    options = {key: _option(rows[0], key) for key in keys}
    return Group(options, counted_rows, diverged, reasons)
