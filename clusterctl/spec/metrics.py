"""Whether lower or higher values of a metric are better.

Everything that ranks or compares by a metric asks here. The direction of a name that is not in the
table is asked from the user, as ``goal``, and never derived from a part of the name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from clusterctl.errors import BadValueError, UsageError


class Goal(StrEnum):
    """Whether the lowest or the highest values of the metric are the best."""

    MIN = "min"
    MAX = "max"

    @property
    def words(self) -> str:
        return f"{'lower' if self is Goal.MIN else 'higher'} is better"

    @property
    def opposite(self) -> Goal:
        return Goal.MAX if self is Goal.MIN else Goal.MIN


_LOWER: Final = frozenset(
    (
        "loss error error_rate perplexity ppl nll mse rmse mae wer cer fid "
        "time seconds latency cost time_ms latency_ms p50_latency_ms p95_latency_ms p99_latency_ms "
        "step_ms update_ms iteration_ms batch_ms epoch_ms data_ms "
        "compute_ms comm_total_ms comm_exposed_ms"
    ).split()
)
_HIGHER: Final = frozenset(
    (
        "accuracy acc f1 auc auroc precision recall bleu iou miou dice r2 psnr ssim "
        "reward return throughput mfu gflops samples_per_s tokens_per_s images_per_s "
        "sequences_per_s examples_per_s frames_per_s words_per_s steps_per_s iterations_per_s "
        "batches_per_s updates_per_s algorithm_gb_per_s bus_gb_per_s"
    ).split()
)
# What was evaluated, and by which rank.
_BEFORE: Final = re.compile(
    r"(?:rank\d+/)?(?:(?:train|training|val|valid|validation|eval|evaluation|test|dev)[/_.])?"
)
# A metric, a sign and a number.
_TARGET: Final = re.compile(r"\s*(.+?)\s*(<=|>=|=)\s*(\S+)\s*")
_SIGNS: Final = {"<=": Goal.MIN, ">=": Goal.MAX}


def goal_given(text: object) -> Goal | None:
    """Return the value of --goal. Raises UsageError if it is not min or max."""
    if text is None:
        return None
    if text not in {*Goal}:
        raise UsageError(
            f"--goal: {text!r} is neither min nor max",
            about="goal-value",
            fix="use --goal min if lower values are better, or --goal max",
        )
    return Goal(str(text))


def goal_of(metric: str) -> Goal | None:
    """Return whether a metric's lowest or highest value is best, if it has one of a few plain
    names, such as ``val/loss`` or ``samples_per_s``; None if it has not, so that the user is asked.
    """
    name = metric.lower()
    plain = name[_BEFORE.match(name).end() :]  # type: ignore[union-attr]
    if plain in _LOWER:
        return Goal.MIN
    return Goal.MAX if plain in _HIGHER else None


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss by its name, not the scale of a loss."""
    return "loss" in metric.lower() and "scale" not in metric.lower()


@dataclass(frozen=True, slots=True)
class Target:
    """A value that a metric should reach: at most or at least, by ``goal``."""

    metric: str
    goal: Goal
    value: float

    @classmethod
    def of(cls, text: str) -> Target:
        """Read a target such as ``eval_accuracy=0.97``, ``loss<=0.3`` or ``widgets>=2``.

        Raises BadValueError for other texts, and for ``=`` if the direction of the metric is not
        known.
        """
        match = _TARGET.fullmatch(text)
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not math.isfinite(value):
            raise BadValueError(
                "not-a-target",
                f"{text!r} is not a metric with a number, such as eval_accuracy=0.97 or loss<=0.3",
            )
        metric = match[1]
        sign = match[2]
        goal = _SIGNS.get(sign) or goal_of(metric)
        if goal is None:
            raise BadValueError(
                "goal-unknown",
                f"it is not known whether lower or higher values of {metric!r} are better: write "
                f"{metric}<={match[3]} or {metric}>={match[3]}",
            )
        return cls(metric, goal, value)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.goal is Goal.MIN else '>='} {self.value:g}"

    def is_reached(self, value: float) -> bool:
        return value <= self.value if self.goal is Goal.MIN else value >= self.value
