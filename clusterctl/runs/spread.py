"""The mean of the values of some runs, their spread, and whether two such means differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from clusterctl.util import formatting

_DIGITS: Final = 4
_LARGE: Final = 1e15
# The two-sided 95 % quantiles of Student's t, by degrees of freedom.
_STUDENT: Final = {
    1: 12.71,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
    15: 2.131,
    20: 2.086,
    30: 2.042,
}


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of the values of ``count`` runs, and their sample standard deviation (0 for one
    run).
    """

    mean: float
    deviation: float
    count: int = field(default=1, compare=False)

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        scale = _scale(values)
        deviation = statistics.stdev(value / scale for value in values) if len(values) > 1 else 0.0
        return cls(mean_of(values), deviation * scale, len(values))

    def with_value(self, value: float) -> Spread:
        """Return the mean and deviation of one value more, by Welford's formula."""
        count = self.count + 1
        apart = value - self.mean
        # The square of a large value does not fit a float.
        before = self.deviation * math.sqrt((count - 2) / (count - 1))
        deviation = math.hypot(before, apart * math.sqrt(1 / count))
        return Spread(self.mean + apart / count, deviation, count)

    def __str__(self) -> str:
        """Return a text such as ``290 ± 17``."""
        return formatting.spread(self.mean, self.deviation)

    def as_dict(self) -> dict[str, float | None]:
        """Return mean, deviation and count for programs. One run has no deviation: None."""
        deviation = self.deviation if self.count > 1 else None
        return {"mean": self.mean, "deviation": deviation, "count": self.count}

    @property
    def ends(self) -> tuple[float, float]:
        """The mean minus and plus the deviation."""
        return self.mean - self.deviation, self.mean + self.deviation

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.deviation / math.sqrt(self.count)

    def times(self, factor: float) -> Spread:
        return Spread(self.mean * factor, self.deviation * factor, self.count)

    def differs_from(self, other: Spread) -> bool | None:
        """Return whether two means differ by more than chance explains; None if that can't be
        judged.

        It can't with a single run, or if repeats have no spread because they have the same seed.
        Means that are equal in all digits that are shown do not differ. Welch's t-test, at 95 %.
        """
        if f"{self.mean:.{_DIGITS}g}" == f"{other.mean:.{_DIGITS}g}":
            return False
        if min(self.count, other.count) == 1 or not (self.deviation and other.deviation):
            return None
        largest = max(self.deviation, other.deviation)
        variances = [(each.error / largest) ** 2 for each in (self, other)]
        weights = [
            variance**2 / (each.count - 1)
            for variance, each in zip(variances, (self, other), strict=True)
        ]
        if not sum(weights):
            return None
        freedom = sum(variances) ** 2 / sum(weights)
        limit = next((_STUDENT[key] for key in reversed(_STUDENT) if key <= freedom), _STUDENT[1])
        return abs(self.mean - other.mean) / largest > limit * math.sqrt(sum(variances))


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of values; NaN or infinite if one of them is."""
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values)
    scale = _scale(values)
    return statistics.fmean(value / scale for value in values) * scale


def _scale(values: Sequence[float]) -> float:
    """Return a divisor. Metrics of a diverged run may be so large that their sum does not fit a
    float.
    """
    return max(1.0, max(map(abs, values)) / _LARGE)
