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
    """A micro-batch, on the device. Every stage of a pipeline is given all of it, though only the first
    computes with the inputs, and the last with the targets."""

    inputs: Array  # (B, ...)
    targets: Array  # (B,) or (B, ...)
    samples: Array  # (B,) uint32: each sample's place in the global batch


class Stage:
    """A run of units, whose parameters a storage holds."""

    def __init__(self, units: Sequence[Unit], storage: Storage, tied: Unit | None = None) -> None:
        """``tied``: the parameters that other stages use too (see ``placement.Ties``)."""
        self.units, self.storage, self._tied = units, storage, tied

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
        if self._tied:
            self.storage.produced(self._tied, last=last)
        return dy
