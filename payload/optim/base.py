"""The optimizer interface, and helpers for the flat arrays that optimizers update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from payload.device.base import Array
from payload.nn.module import Segment


class Optimizer(Protocol):
    """Updates weights with their gradients."""

    state: dict[str, Array]
    """Arrays shaped like ``weights``, by name."""
    updates: int
    """Number of updates so far. Saved and restored with ``state``."""

    def step(self, weights: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        """Update ``weights`` (N,) with ``scale`` times ``grads`` (N,). May overwrite ``grads``."""


def runs(segments: Sequence[Segment], weight_decay: float) -> list[tuple[slice, float]]:
    """Join adjacent segments with the same weight decay. Return pairs (slice of flat array, weight
    decay).
    """
    slices: list[tuple[slice, float]] = []
    for segment in segments:
        decay = weight_decay if segment.parameter.decay else 0.0
        start = segment.start
        if slices and slices[-1][1] == decay and slices[-1][0].stop == start:
            start = slices.pop()[0].start
        slices.append((slice(start, segment.stop), decay))
    return slices
