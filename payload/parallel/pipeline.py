"""Pipeline parallelism: each rank runs its stage, hands activations on, and gradients back.

Where the whole model is one stage, it is one micro-batch after the other, their gradients added up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from payload.comm.base import Communicator, Solo
from payload.device import Array
from payload.nn.base import Unit
from payload.nn.loss import Loss, Sums
from payload.nn.tape import Draw, Tape
from payload.parallel.link import Link
from payload.parallel.storage import Storage

_NOTHING = Sums(0.0, 0.0, 0.0)
_AHEAD = 2  # micro-batches that an evaluation may be ahead of a slower stage


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


def one_forward_one_backward(micro_batches: int, later_stages: int) -> Iterator[bool]:
    """What a stage does next: forward (True) of the next micro-batch, or backward of the oldest in flight."""
    ahead = min(micro_batches, later_stages)
    yield from [True] * ahead
    yield from [True, False] * (micro_batches - ahead)
    yield from [False] * ahead


def idle_share(stages: int, micro_batches: int) -> float:
    """Of a stage's time: the bubble, while the pipeline fills and empties, if all micro-batches take as long.

    Of Narayanan et al. (SC 2021), section 2.2.1, who divide by the ideal time: (stages - 1) / micro_batches.
    """
    return (stages - 1) / (micro_batches + stages - 1)


class Pipeline:
    """1F1B: after as many forward passes as there are later stages, one backward and one forward in turn.

    So a stage keeps tapes for itself and the later stages, however many micro-batches there are; all forward
    first (GPipe) would keep all. Of PipeDream (Narayanan et al., SOSP 2019), with one update for all
    micro-batches, as in Megatron (Narayanan et al., SC 2021, section 2.2.1). Sums are the last stage's, and
    0 elsewhere.
    """

    def __init__(self, stage: Stage, loss: Loss, pp: Communicator | None = None) -> None:
        pp = pp or Solo()
        device = stage.storage.device
        self._stage, self._loss, self._later = stage, loss, pp.size - 1 - pp.rank
        self._before = Link(device, pp, pp.rank - 1) if pp.rank else None
        self._after = Link(device, pp, pp.rank + 1) if self._later else None

    def train(self, batches: Sequence[Batch], *, scale: float, seed: int, iteration: int) -> Sums:
        """Forward and backward; the gradients are of ``scale`` times the summed loss."""
        sums = _NOTHING
        waiting, flying = deque(batches), deque[tuple[Batch, Tape]]()
        for forward in one_forward_one_backward(len(batches), self._later):
            if forward:
                batch = waiting.popleft()
                tape = Tape(draw=Draw(seed, iteration, batch.samples))
                flying.append((batch, tape))
                sums += self._forward(batch, tape)
            else:
                batch, tape = flying.popleft()
                self._backward(batch, tape, scale=scale, last=not (waiting or flying))
        self._drain()
        return sums

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        """Forward only."""
        sums = _NOTHING
        for batch in batches:
            sums += self._forward(batch, Tape(training=False))
            self._drain(_AHEAD)
        self._drain()
        return sums

    def _forward(self, batch: Batch, tape: Tape) -> Sums:
        shape = batch.inputs.shape
        x = self._before.receive_activation(shape) if self._before else batch.inputs
        y = self._stage.forward(x, tape)
        if not self._after:
            return self._loss.forward(y, batch.targets, tape)
        self._after.send_activation(y, shape)
        return _NOTHING

    def _backward(self, batch: Batch, tape: Tape, *, scale: float, last: bool) -> None:
        shape = batch.inputs.shape
        dy = self._after.receive_gradient(shape) if self._after else self._loss.backward(scale, tape)
        dx = self._stage.backward(dy, tape, last=last)
        if self._before:
            self._before.send_gradient(dx, shape)

    def _drain(self, unsent: int = 0) -> None:
        for link in (self._before, self._after):
            if link:
                link.drain(unsent)
