"""The values of a metric in bounded memory: exact figures of all values, and points for a chart.

Values are in buckets, in the order in which the program wrote them. All buckets but the last have
the same number of values, from the first value of a run to the last: one at first, and twice as
many each time that there are too many buckets. So no part of a run has more weight than another,
and no extreme is lost.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Final, NamedTuple

from clusterctl.state.run_record import Metric
from clusterctl.util.numbers import LARGEST

STEP: Final = "step"
EPOCH: Final = "epoch"
ROW: Final = "row"
# A metric is placed by the best axis that its lines have.
_RANKS: Final = {ROW: 0, EPOCH: 1, STEP: 2}
_MOST_BUCKETS: Final = 1024
_MOST_KEPT: Final = 1 << 21


class Point(NamedTuple):
    """A value ``y`` at the step ``x``, the ``row``-th of its metric, counted from 1.

    x: None if it is unknown. time: in Unix seconds, None if unknown.
    """

    x: float | None
    y: float
    time: float | None = None
    row: int = 0


@dataclass(slots=True)
class CurveBin:
    """Consecutive values of a metric: their number, and the first, last, lowest and highest of
    them.

    finite, total: the number and the sum of the values that are not NaN or infinite.
    low, high: the lowest and the highest of these, the earlier of equal values.
    gap: the first value that is NaN or infinite.
    """

    count: int
    first: Point
    last: Point
    low: Point | None
    high: Point | None
    gap: Point | None
    finite: int
    total: float

    @classmethod
    def of(cls, points: Sequence[Point], finite: Sequence[Point], gap: Point | None) -> CurveBin:
        """Return the bucket of ``points``. finite: those whose values are finite."""
        low = min(finite, key=lambda point: point.y, default=None)
        high = max(finite, key=lambda point: point.y, default=None)
        total = sum(point.y for point in finite)
        return cls(len(points), points[0], points[-1], low, high, gap, len(finite), total)

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        return self.total / self.finite if self.finite else None

    def then(self, later: CurveBin) -> CurveBin:
        """Return a bucket with these values and the later ones."""
        low = self.low
        high = self.high
        if low is None or (later.low is not None and later.low.y < low.y):
            low = later.low
        if high is None or (later.high is not None and later.high.y > high.y):
            high = later.high
        return CurveBin(
            self.count + later.count,
            self.first,
            later.last,
            low,
            high,
            self.gap or later.gap,
            self.finite + later.finite,
            self.total + later.total,
        )

    def points(self) -> list[Point]:
        """Return the points that a chart needs, in the order in which the program wrote them."""
        if self.count == 1:
            return [self.first]
        listed = (self.first, self.low, self.high, self.gap, self.last)
        return sorted({point for point in listed if point is not None}, key=lambda point: point.row)

    def unplaced(self) -> CurveBin:
        """Return the bucket without the places of its values."""
        first = self.first._replace(x=None)
        last = self.last._replace(x=None)
        low, high, gap = (
            point and point._replace(x=None) for point in (self.low, self.high, self.gap)
        )
        return CurveBin(self.count, first, last, low, high, gap, self.finite, self.total)


class Column(NamedTuple):
    """Values that a program wrote one after the other, with their places and times.

    xs: None if the places are unknown.
    times: in Unix seconds; None if all are unknown.
    rises: whether each place is after the one before.
    before: the number of earlier values of the metric.
    """

    xs: Sequence[float] | None
    ys: Sequence[float]
    times: Sequence[float | None] | None = None
    rises: bool = False
    before: int = 0

    def within(self, start: float, end: float) -> list[float]:
        """Return the values at places from ``start`` to ``end`` that are not NaN."""
        placed = zip(self.xs or (), self.ys, strict=True)
        return [y for x, y in placed if start <= x <= end and not math.isnan(y)]

    def bucket(self, start: int, end: int) -> CurveBin:
        """Return the bucket of the values from ``start`` to before ``end``."""
        ys = self.ys[start:end]
        total = sum(ys)
        if not math.isfinite(total):
            points = [self._point(at) for at in range(start, end)]
            finite = [point for point in points if math.isfinite(point.y)]
            gap = next((point for point in points if not math.isfinite(point.y)), None)
            return CurveBin.of(points, finite, gap)
        first = self._point(start)
        if end - start == 1:
            return CurveBin(1, first, first, first, first, None, 1, total)
        lowest = min(ys)
        highest = max(ys)
        low = high = first
        if lowest < highest:
            low = self._point(start + ys.index(lowest))
            high = self._point(start + ys.index(highest))
        count = end - start
        return CurveBin(count, first, self._point(end - 1), low, high, None, count, total)

    def _point(self, at: int) -> Point:
        x = None if self.xs is None else self.xs[at]
        time = None if self.times is None else self.times[at]
        return Point(x, self.ys[at], time, self.before + at + 1)


@dataclass(slots=True)
class Places:
    """Values at the first place in each range of places. A later value at the same place replaces
    an earlier one.

    width: of a range: a power of 2, so that curves with the same places have the same places here,
        also if one began anew somewhere.
    """

    width: float = 2.0**-64
    _firsts: dict[float, tuple[float, float]] = field(default_factory=dict)

    def extend(self, xs: Sequence[float], ys: Sequence[float], *, rises: bool = False) -> None:
        """Add values. rises: whether each place is after the one before."""
        at = 0
        while at < len(xs):
            self._add(xs[at], ys[at])
            end = (xs[at] // self.width + 1) * self.width
            at = max(at + 1, bisect_left(xs, end, at)) if rises else at + 1
        while len(self._firsts) > _MOST_BUCKETS:
            places = self.points()
            length = min(max(places) - min(places), LARGEST)
            _, exponent = math.frexp(length / _MOST_BUCKETS)
            self.width = max(2 * self.width, 2.0 ** (exponent - 1))
            self._firsts = {}
            for x, y in places.items():
                self._add(x, y)

    def _add(self, x: float, y: float) -> None:
        number = x // self.width
        first = self._firsts.get(number)
        if first is None or x <= first[0]:
            self._firsts[number] = x, y

    def points(self) -> dict[float, float]:
        """Return the values by their places."""
        return dict(self._firsts.values())


@dataclass(slots=True)
class Curve:
    """All values of a metric.

    axis: what the places of its values are: ``step``, ``epoch`` or ``row``. repeated: the number of
    values whose place an earlier value has, or is behind: after a restart, or if several programs
    wrote the file.
    unplaced: the number of values without a place on this axis. size: the number of values in a
        full bucket.
    same: the number of values with the place of the value before, such as those of batches of an
        epoch.
    places: the last value at each place, to compare or average curves.
    """

    axis: str = ""
    buckets: list[CurveBin] = field(default_factory=list)
    repeated: int = 0
    unplaced: int = 0
    same: int = 0
    size: int = 1
    count: int = 0
    places: Places | None = None
    _top: float = -math.inf

    def extend(self, axis: str, column: Column) -> None:
        """Add values. Places by another axis than that of the curve are unknown."""
        if axis != self.axis:
            column = self._on_axis(axis, column)
        self._count_repeated(column)
        if self.places is not None and column.xs is not None:
            self.places.extend(column.xs, column.ys, rises=column.rises)
        column = column._replace(before=self.count)
        self.count += len(column.ys)
        at = 0
        end = len(column.ys)
        buckets = self.buckets
        while at < end:
            room = self.size - buckets[-1].count if buckets else 0
            if room:
                more = column.bucket(at, min(end, at + room))
                buckets[-1] = buckets[-1].then(more)
            else:
                if len(buckets) == _MOST_BUCKETS:
                    self.buckets = buckets = [
                        first.then(second)
                        for first, second in zip(buckets[::2], buckets[1::2], strict=True)
                    ]
                    self.size *= 2
                more = column.bucket(at, min(end, at + self.size))
                buckets.append(more)
            at += more.count

    def _on_axis(self, axis: str, column: Column) -> Column:
        if not self.buckets:
            self.axis = axis
        elif _RANKS.get(axis, 0) > _RANKS.get(self.axis, 0):
            self.axis = axis
            self.unplaced = self.count
            self.buckets = [bucket.unplaced() for bucket in self.buckets]
            self.repeated = 0
            self.same = 0
            self._top = -math.inf
            self.places = self.places and Places()
        else:
            return column._replace(xs=None)
        return column

    def _count_repeated(self, column: Column) -> None:
        if column.xs is None:
            self.unplaced += len(column.ys)
        elif column.rises and column.xs[0] > self._top:
            self._top = column.xs[-1]
        else:
            before: float | None = self.buckets[-1].last.x if self.buckets else None
            for x in column.xs:
                self.same += x == before
                before = x
                if x > self._top:
                    self._top = x
                else:
                    self.repeated += 1

    @property
    def whole(self) -> CurveBin | None:
        """The figures of all values."""
        return reduce(CurveBin.then, self.buckets) if self.buckets else None

    @property
    def drawn_axis(self) -> str:
        """The axis of charts: by row if most values have the place of the value before."""
        return ROW if 2 * self.same > self.count else self.axis

    @property
    def is_complete(self) -> bool:
        """Whether ``points`` returns every value."""
        return self.size == 1

    def metric(self) -> Metric:
        """Return the figures of all values for run.json."""
        whole = self.whole
        if whole is None:
            return Metric()
        last = whole.last
        low = whole.low
        high = whole.high
        is_finite = math.isfinite(last.y)
        first = whole.first.y
        return Metric(
            first=first if math.isfinite(first) else None,
            last=last.y if is_finite else None,
            last_step=_shown_place(last),
            min=low and low.y,
            min_step=_shown_place(low),
            max=high and high.y,
            max_step=_shown_place(high),
            count=whole.count,
            nonfinite=whole.count - whole.finite,
            nonfinite_step=_shown_place(whole.gap),
            last_nonfinite=None if is_finite else str(last.y),
            axis=self.axis or ROW,
            repeated=self.repeated,
        )

    def drawn(self) -> list[Point]:
        """Return the points of a chart with a known place, in the order in which the program wrote
        them.

        Of very many values, these are the first, lowest, highest and last of each bucket. Points of
        an attempt that a later attempt repeated are then left out.
        """
        points = [point for bucket in self.buckets for point in bucket.points()]
        if self.drawn_axis != self.axis:
            return [point._replace(x=point.row) for point in points]
        points = [point for point in points if point.x is not None]
        if self.is_complete or not self.repeated:
            return points
        return [point for segment in _latest(points) for point in segment]

    def points(self) -> list[tuple[float, float]]:
        """Return ``drawn`` as (place, value)."""
        return [(point.x, point.y) for point in self.drawn() if point.x is not None]

    def thin(self) -> list[tuple[float, float]]:
        """Return values at a fixed stride, as (place, value): the first of each bucket."""
        firsts = [bucket.first for bucket in self.buckets]
        if self.drawn_axis != self.axis:
            return [(point.row, point.y) for point in firsts]
        return [(point.x, point.y) for point in firsts if point.x is not None]

    def means(self, most: int) -> list[tuple[float, float]]:
        """Return the means of at most ``most`` equal parts, as (place of the last value, mean)."""
        size = math.ceil(len(self.buckets) / most)
        parts = (self.buckets[at : at + size] for at in range(0, len(self.buckets), size or 1))
        joined = [reduce(CurveBin.then, part) for part in parts]
        by_row = self.drawn_axis != self.axis
        return [
            ((part.last.row if by_row else part.last.x) or 0, part.mean)
            for part in joined
            if part.mean is not None
        ]


def _shown_place(point: Point | None) -> float | None:
    if point is None or point.x is None:
        return None
    return int(point.x) if isinstance(point.x, float) and point.x.is_integer() else point.x


def _latest(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the parts of a curve with rising places, each without the range of the parts after
    it.
    """
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(points), 1) if (b.x or 0) < (a.x or 0))]
    first = math.inf
    last = -math.inf
    parts: list[list[Point]] = []
    for start, end in reversed([*pairwise([*starts, len(points)])]):
        part = points[start:end]
        parts.append([point for point in part if not first <= (point.x or 0) <= last])
        first = min(first, part[0].x or 0)
        last = max(last, part[-1].x or 0)
    yield from reversed(parts)


@dataclass(slots=True)
class FiniteValues:
    """The finite values of a metric: all, or every second, fourth ... of very many."""

    values: array[float] = field(default_factory=lambda: array("d"))
    stride: int = 1
    _count: int = 0

    def extend(self, ys: Sequence[float]) -> None:
        if not math.isfinite(sum(ys)):
            ys = [*filter(math.isfinite, ys)]
        self.values.extend(array("d", ys[-self._count % self.stride :: self.stride]))
        self._count += len(ys)
        while len(self.values) > _MOST_KEPT:
            self.values = self.values[::2]
            self.stride *= 2

    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None
