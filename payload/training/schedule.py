"""The learning rate as a function of the iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from payload.errors import UsageError

_MOST = 1e30  # far above what can be learned with, and far below where float32 ends


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A linear warm-up, then a decay. ``at`` is a pure function: a run can go on from any iteration.

    ``kind`` is ``constant``, ``cosine`` (Loshchilov and Hutter, "SGDR", 2017, without restarts: down to
    ``least`` in the last iteration, and there afterwards) or ``step``: times ``factor`` after each of
    ``milestones``, not below ``least``.
    """

    peak: float
    kind: str
    iterations: int  # of the whole run
    warmup: int = 0  # iterations in which it climbs: the first has peak / warmup, the last has peak
    least: float = 0.0
    milestones: tuple[int, ...] = ()  # iterations
    factor: float = 0.1

    def __post_init__(self) -> None:
        """Raise UsageError if these are no learning rates."""
        if not self.peak <= _MOST:
            raise UsageError(
                f"--lr: a learning rate of {self.peak:g} is above {_MOST:g}; see --scale-lr, too",
                code="lr-too-high",
            )
        if self.least > self.peak:
            raise UsageError(
                f"--min-lr {self.least:g} is above the learning rate, which is {self.peak:g}",
                code="min-above-max",
            )
        for flag, first in (("warmup", self.warmup), ("decay", min(self.milestones, default=-1) + 1)):
            if first > self.iterations:
                raise UsageError(
                    f"--{flag}-iterations: the run ends after {self.iterations} iterations, before these; "
                    "give fewer, or a longer run (--epochs, --iterations)",
                    code="run-too-short",
                )

    def at(self, iteration: int) -> float:
        """Of an iteration, from 1."""
        if iteration <= self.warmup:
            return self.peak * iteration / self.warmup
        if self.kind == "cosine":
            start = max(1, self.warmup)
            done = min(1.0, (iteration - start) / max(1, self.iterations - start))
            return self.least + (self.peak - self.least) * (1 + math.cos(math.pi * done)) / 2
        if self.kind == "step":
            passed = sum(iteration > milestone for milestone in self.milestones)
            return max(self.least, self.peak * self.factor**passed)
        return self.peak


def scaled(lr: float, rule: str, workers: int) -> float:
    """The rate for a global batch that has grown with the workers: ``linear`` (Goyal et al., "Accurate, Large
    Minibatch SGD", 2017), ``sqrt`` (Krizhevsky, "One weird trick", 2014; for Adam and LAMB) or ``none``."""
    return lr * {"none": 1.0, "linear": float(workers), "sqrt": math.sqrt(workers)}[rule]
