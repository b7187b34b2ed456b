"""Losses, summed over targets: the caller divides by their number in the *global* batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from payload.device import Array, Device
from payload.nn.tape import Tape


@dataclass(frozen=True, slots=True)
class Sums:
    """Over the targets of one micro-batch; numbers or arrays of one number that are still on the device."""

    loss: Array | float
    correct: Array | float
    count: Array | float

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.loss + other.loss, self.correct + other.correct, self.count + other.count)


class Loss(Protocol):
    """What training makes small."""

    def forward(self, output: Array, targets: Array, tape: Tape) -> Sums: ...

    def backward(self, scale: float, tape: Tape) -> Array:
        """The gradient of ``scale`` times the summed loss by ``output``."""


class SoftmaxCrossEntropy:
    """-log softmax(logits)[target], over the last axis."""

    def __init__(self, device: Device) -> None:
        self._xp = device.xp

    def forward(self, logits: Array, targets: Array, tape: Tape) -> Sums:
        """(..., classes), (...) whole numbers."""
        xp = self._xp
        flat, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        rows = xp.arange(len(labels))
        log_p = flat - flat.max(axis=1, keepdims=True)  # exp cannot overflow
        log_p -= xp.log(xp.exp(log_p).sum(axis=1, keepdims=True))
        tape.push(log_p, labels, logits.shape)
        loss = -log_p[rows, labels].sum(dtype="float64")
        return Sums(loss, (flat.argmax(axis=1) == labels).sum(), len(labels))

    def backward(self, scale: float, tape: Tape) -> Array:
        log_p, labels, shape = tape.pop()
        dlogits: Array = self._xp.exp(log_p)
        dlogits[self._xp.arange(len(labels)), labels] -= 1
        dlogits *= scale
        return dlogits.reshape(shape)
