"""The loss, summed over targets. The caller divides it by the number of targets in the *global*
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from payload.device.base import Array, acc_dtype
from payload.nn.module import Context, Tape


@dataclass(frozen=True, slots=True)
class LossSums:
    """Loss, correct predictions and targets, summed over a micro-batch: numbers, or 0-d device
    arrays.
    """

    loss: Array | float
    correct: Array | float
    count: Array | float

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss, self.correct + other.correct, self.count + other.count
        )


class SoftmaxCrossEntropy:
    """-log softmax(logits)[target] over the last axis, in float32 or wider.

    Tensor-parallel ranks with logits of different classes exchange four numbers for each target,
    not logits.
    """

    def __init__(self, context: Context, *, split: bool = False) -> None:
        """Create the layer. split: whether tensor-parallel ranks hold the logits of different
        classes.
        """
        self._device = context.device
        self._tp = context.tp
        self._split = split

    def forward(self, logits: Array, targets: Array, tape: Tape) -> LossSums:
        """Return loss, correct predictions and number of targets. Negative targets are ignored.

        logits: (..., classes or this rank's part). targets: (...) integers.
        """
        xp = self._device.xp
        rows = logits.reshape(-1, logits.shape[-1])
        labels = targets.reshape(-1).astype("int64", copy=False)
        start = self._tp.rank * rows.shape[1] if self._split else 0
        # Rows: highest logit, its class, Σ exp(logit - highest), the target's logit.
        local = xp.empty((4, len(rows)), acc_dtype(logits.dtype))

        def reduce(logits: Array, index: Array, *results: Array) -> None:
            top, best, total, target = results
            logits = logits.astype(total.dtype)
            top[...] = logits.max(axis=1)
            best[...] = logits.argmax(axis=1) + start
            target[...] = xp.where(
                _is_local(index, logits), logits[_local_index(xp, index, logits)], 0
            )
            logits -= top[:, None]
            total[...] = xp.exp(logits, out=logits).sum(axis=1)

        self._device.blocked(reduce, rows, labels - start, *local)
        # Each has shape (ranks, targets).
        tops, bests, totals, target_logits = self._from_all_parts(local).swapaxes(0, 1)
        top = tops.max(axis=0)
        log_sum = xp.log((totals * xp.exp(tops - top)).sum(axis=0)) + top
        best = xp.take_along_axis(bests, tops.argmax(axis=0)[None], axis=0)[0]
        tape.push(logits, labels, labels - start, log_sum)
        counts = labels >= 0
        loss = xp.where(counts, log_sum - target_logits.sum(axis=0), 0).sum(dtype="float64")
        return LossSums(loss, (best == labels).sum(), counts.sum())

    def backward(self, scale: float, tape: Tape) -> Array:
        """Return the gradient of ``scale`` times the summed loss, in the memory of the logits."""
        logits, labels, places, log_sum = tape.pop()
        xp = self._device.xp

        def differentiate(logits: Array, label: Array, index: Array, log_sum: Array) -> None:
            probs = logits - log_sum[:, None]
            xp.exp(probs, out=probs)
            probs[_local_index(xp, index, logits)] -= _is_local(index, logits)
            probs *= ((label >= 0) * scale).astype(probs.dtype)[:, None]
            logits[...] = probs

        rows = logits.reshape(-1, logits.shape[-1])
        self._device.blocked(differentiate, rows, labels, places, log_sum)
        return logits

    def _from_all_parts(self, local: Array) -> Array:
        """Gather ``local`` (4, targets) from all tensor-parallel ranks, giving (ranks, 4,
        targets).
        """
        if not self._split or self._tp.size == 1:
            return local[None]
        gathered: Array = self._device.xp.empty((self._tp.size, *local.shape), local.dtype)
        self._tp.allgather_into(local.ravel(), gathered.ravel())
        return gathered


def _is_local(index: Array, logits: Array) -> Array:
    return (index >= 0) & (index < logits.shape[1])


def _local_index(xp: ModuleType, index: Array, logits: Array) -> tuple[Array, Array]:
    # For logits on other ranks, the columns are arbitrary.
    return xp.arange(len(logits)), index.clip(0, logits.shape[1] - 1)
