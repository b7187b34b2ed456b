"""Losses, summed over targets: the caller divides by their number in the *global* batch."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from payload.device import Array, wide
from payload.nn.module import Context, Tape


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
    """-log softmax(logits)[target], over the last axis, in at least float32.

    Where tensor-parallel ranks hold the logits of parts of the classes, those stay where they are: four
    numbers a target are exchanged.
    """

    def __init__(self, context: Context, *, split: bool = False) -> None:
        """``split``: each tensor-parallel rank holds the logits of its part of the classes."""
        self._device, self._tp, self._split = context.device, context.tp, split

    def forward(self, logits: Array, targets: Array, tape: Tape) -> Sums:
        """(..., classes or this rank's part), (...) whole numbers, of which those below 0 do not count."""
        xp = self._device.xp
        rows, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).astype("int64", copy=False)
        start = self._tp.rank * rows.shape[1] if self._split else 0
        facts = xp.empty((len(rows), 4), wide(logits.dtype))  # highest logit, its class, sum, target's logit

        def gather(logits: Array, place: Array, facts: Array) -> None:
            logits = logits.astype(facts.dtype)
            top = logits.max(axis=1)
            facts[:, 0], facts[:, 1] = top, logits.argmax(axis=1) + start
            facts[:, 3] = xp.where(_here(place, logits), logits[_at(xp, place, logits)], 0)
            logits -= top[:, None]
            facts[:, 2] = xp.exp(logits, out=logits).sum(axis=1)

        self._device.blocked(gather, rows, labels - start, facts)
        every = self._from_all_parts(facts)  # (ranks, targets, 4)
        top = every[..., 0].max(axis=0)
        log_sum = xp.log((every[..., 2] * xp.exp(every[..., 0] - top)).sum(axis=0)) + top
        best = xp.take_along_axis(every[..., 1], every[..., 0].argmax(axis=0)[None], axis=0)[0]
        tape.push(logits, labels, labels - start, log_sum)
        counts = labels >= 0
        loss = xp.where(counts, log_sum - every[..., 3].sum(axis=0), 0).sum(dtype="float64")
        return Sums(loss, (best == labels).sum(), counts.sum())

    def backward(self, scale: float, tape: Tape) -> Array:
        """Same shape as the logits, and in their place."""
        logits, labels, places, log_sum = tape.pop()
        xp = self._device.xp

        def differentiate(logits: Array, label: Array, place: Array, log_sum: Array) -> None:
            shares = logits - log_sum[:, None]
            xp.exp(shares, out=shares)
            shares[_at(xp, place, logits)] -= _here(place, logits)
            shares *= ((label >= 0) * scale).astype(shares.dtype)[:, None]
            logits[...] = shares

        rows = logits.reshape(-1, logits.shape[-1])
        self._device.blocked(differentiate, rows, labels, places, log_sum)
        dlogits: Array = logits
        return dlogits

    def _from_all_parts(self, facts: Array) -> Array:
        if not self._split or self._tp.size == 1:
            return facts[None]
        every: Array = self._device.xp.empty((self._tp.size, *facts.shape), facts.dtype)
        self._tp.allgather_into(facts.ravel(), every.ravel())
        return every


def _here(place: Array, logits: Array) -> Array:
    """Whether a target's class is among those of these logits."""
    here: Array = (place >= 0) & (place < logits.shape[1])
    return here


def _at(xp: ModuleType, place: Array, logits: Array) -> tuple[Array, Array]:
    """Where a target's logit is; some other place in its row if it is not here."""
    return xp.arange(len(logits)), place.clip(0, logits.shape[1] - 1)
