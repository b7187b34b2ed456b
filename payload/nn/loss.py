"""The loss, summed over targets: the caller divides by their number in the *global* batch."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from payload.device.base import Array, acc_dtype
from payload.nn.module import Context, Tape


@dataclass(frozen=True, slots=True)
class LossSums:
    """Over the targets of one micro-batch; numbers or arrays of one number that are still on the device."""

    loss: Array | float
    correct: Array | float
    count: Array | float

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.loss + other.loss, self.correct + other.correct, self.count + other.count)


class SoftmaxCrossEntropy:
    """-log softmax(logits)[target], over the last axis, in at least float32.

    Where tensor-parallel ranks hold the logits of parts of the classes, those stay where they are: four
    numbers a target are exchanged.
    """

    def __init__(self, context: Context, *, split: bool = False) -> None:
        """``split``: each tensor-parallel rank holds the logits of its part of the classes."""
        self._device, self._tp, self._split = context.device, context.tp, split

    def forward(self, logits: Array, targets: Array, tape: Tape) -> LossSums:
        """(..., classes or this rank's part), (...) whole numbers, of which those below 0 do not count."""
        xp = self._device.xp
        rows, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).astype("int64", copy=False)
        start = self._tp.rank * rows.shape[1] if self._split else 0
        mine = xp.empty((4, len(rows)), acc_dtype(logits.dtype))  # one number of each kind for each target

        def reduce(logits: Array, place: Array, *results: Array) -> None:
            top, best, total, target = results
            logits = logits.astype(total.dtype)
            top[...], best[...] = logits.max(axis=1), logits.argmax(axis=1) + start
            target[...] = xp.where(_here(place, logits), logits[_at(xp, place, logits)], 0)
            logits -= top[:, None]
            total[...] = xp.exp(logits, out=logits).sum(axis=1)

        self._device.blocked(reduce, rows, labels - start, *mine)
        # (ranks, targets) each: the highest logit, its class, Σ exp(logit - highest), the target's logit
        tops, bests, totals, target_logits = self._from_all_parts(mine).swapaxes(0, 1)
        top = tops.max(axis=0)
        log_sum = xp.log((totals * xp.exp(tops - top)).sum(axis=0)) + top
        best = xp.take_along_axis(bests, tops.argmax(axis=0)[None], axis=0)[0]
        tape.push(logits, labels, labels - start, log_sum)
        counts = labels >= 0
        loss = xp.where(counts, log_sum - target_logits.sum(axis=0), 0).sum(dtype="float64")
        return LossSums(loss, (best == labels).sum(), counts.sum())

    def backward(self, scale: float, tape: Tape) -> Array:
        """The gradient of ``scale`` times the summed loss, of the shape of the logits and in their place."""
        logits, labels, places, log_sum = tape.pop()
        xp = self._device.xp

        def differentiate(logits: Array, label: Array, place: Array, log_sum: Array) -> None:
            probs = logits - log_sum[:, None]
            xp.exp(probs, out=probs)
            probs[_at(xp, place, logits)] -= _here(place, logits)
            probs *= ((label >= 0) * scale).astype(probs.dtype)[:, None]
            logits[...] = probs

        rows = logits.reshape(-1, logits.shape[-1])
        self._device.blocked(differentiate, rows, labels, places, log_sum)
        return logits

    def _from_all_parts(self, mine: Array) -> Array:
        """(4, targets) → (ranks, 4, targets)"""
        if not self._split or self._tp.size == 1:
            return mine[None]
        every: Array = self._device.xp.empty((self._tp.size, *mine.shape), mine.dtype)
        self._tp.allgather_into(mine.ravel(), every.ravel())
        return every


def _here(place: Array, logits: Array) -> Array:
    """Whether a target's class is among those of these logits."""
    return (place >= 0) & (place < logits.shape[1])


def _at(xp: ModuleType, place: Array, logits: Array) -> tuple[Array, Array]:
    """Where a target's logit is; some other place in its row if it is not here."""
    return xp.arange(len(logits)), place.clip(0, logits.shape[1] - 1)
