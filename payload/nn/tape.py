"""What a forward pass leaves for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
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
    again: bool = False  # in a recompute: running statistics and the like have seen this micro-batch
    _stack: list[tuple[Any, ...]] = field(default_factory=list)

    def push(self, *values: Any) -> None:
        """Keep values for ``backward``; an evaluation keeps none."""
        if self.training:
            self._stack.append(values)

    def pop(self) -> tuple[Any, ...]:
        """The values that were pushed last."""
        return self._stack.pop()

    def fork(self, *, again: bool) -> Tape:
        """An empty tape of the same micro-batch, for a part of it: first run, or run again."""
        return Tape(self.training, self.draw, again)

    @property
    def nbytes(self) -> int:
        """Memory that it keeps from being freed; what several views look into is counted once."""
        owners = {id(owner): owner.nbytes for values in self._stack for owner in _owners(values)}
        return sum(owners.values())


def _owners(value: Any) -> Iterator[Array]:
    """The arrays that own the memory of the arrays in a value."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _owners(part)
    elif hasattr(value, "nbytes"):
        base = getattr(value, "base", None)
        yield value if base is None else base
