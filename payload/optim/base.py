"""What an optimizer is, and what it knows of the flat arrays that it works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from payload.device.base import Array
from payload.nn.module import Segment


class Optimizer(Protocol):
    """Updates values by gradients."""

    state: dict[str, Array]
    """What it remembers: arrays like ``weights``, by name."""
    updates: int
    """How many there were; to be kept and restored with ``state``."""

    def step(self, weights: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        """Update ``weights`` (N,) in place by ``scale`` times ``grads`` (N,).

        ``grads`` are undefined afterwards.
        """


def runs(segments: Sequence[Segment], weight_decay: float) -> list[tuple[slice, float]]:
    """Stretches of the flat arrays, as long as can be, each with the decay that all of it is subject to."""
    found: list[tuple[slice, float]] = []
    for segment in segments:
        decay = weight_decay if segment.parameter.decay else 0.0
        start = segment.start
        if found and found[-1][1] == decay and found[-1][0].stop == start:
            start = found.pop()[0].start
        found.append((slice(start, segment.stop), decay))
    return found
