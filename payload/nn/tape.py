"""What a forward pass leaves for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from payload.device import Array


@dataclass(frozen=True, slots=True)
class Draw:
    """Whence one micro-batch's random numbers come: the same on any layout, and again in a recompute."""

    seed: int
    iteration: int
    samples: Array  # (B,) uint32 on the device: each sample's place in the global batch


@dataclass(slots=True)
class Tape:
    """A stack, one for each micro-batch in flight: layers push in ``forward`` and pop in ``backward``.

    Layers run backward in the reverse order of forward, so that each finds its own on top.
    """

    training: bool = True
    draw: Draw | None = None  # None: dropout is off
    _stack: list[tuple[Any, ...]] = field(default_factory=list)

    def push(self, *values: Any) -> None:
        """Keep values for ``backward``; an evaluation keeps none."""
        if self.training:
            self._stack.append(values)

    def pop(self) -> tuple[Any, ...]:
        """The values that were pushed last."""
        return self._stack.pop()

    def fork(self) -> Tape:
        """An empty tape of the same micro-batch, on which a part of it can be run again."""
        return Tape(self.training, self.draw)
