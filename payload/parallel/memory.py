"""What training keeps in memory on each rank, and what the paper on ZeRO says it takes."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from payload.parallel.engine import Engine
from payload.precision import Precision


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank, wherever they are; without activations."""

    weights: int  # that layers compute with, unless they are the masters themselves
    gradients: int
    masters: int
    optimizer: int  # its state
    working: int  # buffers, through which weights and gradients of others come and go

    @property
    def total(self) -> int:
        return int(sum(astuple(self)))


def held(engine: Engine) -> Held:
    """By a rank, as far as it has trained: buffers are made when they are needed first."""
    storage, state = engine.storage, engine.optimizer.state.values()
    return Held(
        weights=0 if storage.weights is storage.values else storage.weights.nbytes,
        gradients=sum(array.nbytes for array in storage.gradients),
        masters=storage.values.nbytes,
        optimizer=sum(array.nbytes for array in state),
        working=storage.working_bytes,
    )


def formula(numbers: int, *, precision: Precision, states: int, ranks: int, zero: int) -> Held:
    """Of a model with so many numbers, on data-parallel ranks: figure 1 of the paper (see ``storage``), but
    with gradients as wide as masters, and without weights where the masters serve as such.

    Args:
        states: numbers that the optimizer keeps for each of the model's.
        zero: what is in parts: from stage 1 on masters and optimizer, from 2 gradients, from 3 weights.
    """
    wide, narrow = precision.master.itemsize, precision.compute.itemsize
    part = -(-numbers // ranks)
    owned, summed, computed = (part if zero >= stage else numbers for stage in (1, 2, 3))
    weights = 0 if wide == narrow and owned == computed else computed * narrow
    return Held(weights, summed * wide, owned * wide, owned * wide * states, 0)
