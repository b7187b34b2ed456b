"""The learning rate as a function of the iteration. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from payload.cli.config import TrainConfig
from payload.errors import UsageError

# This is far above any useful rate, and far below the maximum of float32.
_MOST = 1e30


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A linear warm-up followed by a decay. ``at`` is a pure function, so a run can resume at any
    iteration.

    ``kind`` is ``constant``, ``cosine`` (Loshchilov and Hutter, "SGDR", 2017, without restarts:
    reaches ``minimum`` in the last iteration and stays there) or ``step``: multiplied by ``factor``
    after each of ``milestones``, but never below ``minimum``.
    """

    peak: float
    kind: str
    # Length of the whole run.
    iterations: int
    # Number of warm-up iterations. The rate rises from peak / warmup in the first to peak in the
    # last.
    warmup: int = 0
    minimum: float = 0.0
    # Numbers of iterations.
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        """Raise UsageError if a rate is too high, or the run ends before the warm-up or a
        milestone.
        """
        if not self.peak <= _MOST:
            raise UsageError(
                f"--lr: a learning rate of {self.peak:g} exceeds {_MOST:g}; lower --lr, or omit "
                "--scale-lr",
                code="lr-too-high",
            )
        if self.minimum > self.peak:
            raise UsageError(
                f"--min-lr {self.minimum:g} is above the learning rate of {self.peak:g}",
                code="min-above-max",
            )
        for flag, first in (
            ("warmup", self.warmup),
            ("decay", min(self.milestones, default=-1) + 1),
        ):
            if first > self.iterations:
                raise UsageError(
                    f"--{flag}-iterations: the run ends earlier, after {self.iterations} "
                    f"iterations; lower --{flag}-iterations, or make the run longer with "
                    "--epochs or --iterations",
                    code="run-too-short",
                )

    def at(self, iteration: int) -> float:
        """Return the learning rate of an iteration, counted from 1."""
        if iteration <= self.warmup:
            return self.peak * iteration / self.warmup
        if self.kind == "cosine":
            start = max(1, self.warmup)
            done = min(1.0, (iteration - start) / max(1, self.iterations - start))
            return self.minimum + (self.peak - self.minimum) * (1 + math.cos(math.pi * done)) / 2
        if self.kind == "step":
            passed = sum(iteration > milestone for milestone in self.milestones)
            return max(self.minimum, self.peak * self.factor**passed)
        return self.peak


def build_schedule(config: TrainConfig, workers: int, per_epoch: int) -> LearningRate:
    """Build the schedule of a run. workers: data-parallel ranks. per_epoch: iterations in an epoch.

    Raises UsageError if a rate is too high, or the run ends before the warm-up or a milestone.
    """
    settings = config.optimizer
    batch = config.batch
    iterations = min(batch.epochs * per_epoch, batch.iterations or batch.epochs * per_epoch)
    return LearningRate(
        peak=scaled(settings.lr or 0.0, settings.scale_lr, workers),
        kind=settings.schedule,
        iterations=iterations,
        warmup=settings.warmup_iterations,
        minimum=settings.min_lr,
        milestones=settings.decay_iterations or (),
        factor=settings.decay_factor,
    )


def scaled(lr: float, rule: str, workers: int) -> float:
    """Scale the learning rate for a global batch that grows with the number of data-parallel
    workers.

    rule: ``linear`` (Goyal et al., "Accurate, Large Minibatch SGD", 2017), ``sqrt`` (Krizhevsky,
    "One weird trick", 2014; for Adam and LAMB) or ``none``.
    """
    return lr * {"none": 1.0, "linear": float(workers), "sqrt": math.sqrt(workers)}[rule]
