"""In which order a rank works through the micro-batches of an iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from payload.nn.loss import Loss, Sums
from payload.nn.tape import Draw, Tape
from payload.parallel.stage import Batch, Stage

NOTHING = Sums(0.0, 0.0, 0.0)


class Schedule(Protocol):
    """Runs micro-batches through this rank's stage. Sums are the last stage's, elsewhere ``NOTHING``."""

    def train(self, batches: Sequence[Batch], *, scale: float, seed: int, iteration: int) -> Sums:
        """Forward and backward; the gradients are of ``scale`` times the summed loss."""

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        """Forward only."""


class InTurn:
    """The whole model is here: one micro-batch after the other, their gradients added up."""

    def __init__(self, stage: Stage, loss: Loss) -> None:
        self._stage, self._loss = stage, loss

    def train(self, batches: Sequence[Batch], *, scale: float, seed: int, iteration: int) -> Sums:
        sums = NOTHING
        for number, batch in enumerate(batches, start=1):
            tape = Tape(draw=Draw(seed, iteration, batch.samples))
            output = self._stage.forward(batch.inputs, tape)
            sums += self._loss.forward(output, batch.targets, tape)
            self._stage.backward(self._loss.backward(scale, tape), tape, last=number == len(batches))
        return sums

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        sums = NOTHING
        for batch in batches:
            tape = Tape(training=False)
            sums += self._loss.forward(self._stage.forward(batch.inputs, tape), batch.targets, tape)
        return sums
