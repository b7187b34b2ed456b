"""One rank's units, run forward and backward for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from payload.device import Array
from payload.nn.base import Unit
from payload.nn.tape import Tape
from payload.parallel.storage import Storage


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch, on the device. On a pipeline the first stage reads the inputs, the last the targets."""

    inputs: Array  # (B, ...)
    targets: Array  # (B,) or (B, ...)
    samples: Array  # (B,) uint32: each sample's place in the global batch


class Stage:
    """A run of units, whose parameters a storage holds."""

    def __init__(self, units: Sequence[Unit], storage: Storage) -> None:
        self.units, self.storage = units, storage

    def forward(self, x: Array, tape: Tape) -> Array:
        for unit in self.units:
            self.storage.gather(unit)
            x = unit.layer.forward(x, tape)
            self.storage.release()
        return x

    def backward(self, dy: Array, tape: Tape, *, last: bool) -> Array:
        """``last``: of this iteration's micro-batches."""
        for unit in reversed(self.units):
            self.storage.gather(unit, backward=True)
            dy = unit.layer.backward(dy, tape)
            self.storage.produced(unit, last=last)
        return dy
