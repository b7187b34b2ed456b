"""The loss, summed over targets. The caller divides it by the number of targets in the *global*
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from payload.device.base import Array, Kernel, Reduction, acc_dtype
from payload.nn.module import LayerContext, Tape


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

    def __init__(self, context: LayerContext, *, split: bool = False) -> None:
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
        places = labels - start
        # Rows: highest logit, its class, Σ exp(logit - highest), the target's logit.
        local = xp.empty((4, len(rows)), acc_dtype(logits.dtype))
        self._device.reduce(_SUMS, rows, *local[:3])
        local[1] += start
        # For targets whose logit is on another rank, the column is arbitrary.
        columns = places.clip(0, rows.shape[1] - 1)
        local[3] = xp.where(columns == places, rows[xp.arange(len(rows)), columns], 0)
        # Each has shape (ranks, targets).
        tops, bests, totals, target_logits = self._from_all_parts(local).swapaxes(0, 1)
        top = tops.max(axis=0)
        log_sum = xp.log((totals * xp.exp(tops - top)).sum(axis=0)) + top
        best = xp.take_along_axis(bests, tops.argmax(axis=0)[None], axis=0)[0]
        tape.push(logits, labels, places, log_sum)
        counts = labels >= 0
        loss = xp.where(counts, log_sum - target_logits.sum(axis=0), 0).sum(dtype="float64")
        return LossSums(loss, (best == labels).sum(), counts.sum())

    def backward(self, scale: float | Array, tape: Tape) -> Array:
        """Return the gradient of ``scale`` times the summed loss, in the memory of the logits."""
        logits, labels, places, log_sum = tape.pop()
        rows = logits.reshape(-1, logits.shape[-1])
        factor = ((labels >= 0) * scale).astype(log_sum.dtype)
        numbers = (array[:, None] for array in (log_sum, factor, places))
        self._device.apply(_GRADIENT, {}, *numbers, rows)
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


def _sum_up(logits: Array, top: Array, best: Array, total: Array) -> None:
    logits = logits.astype(total.dtype)
    top[...] = logits.max(axis=1)
    best[...] = logits.argmax(axis=1)
    logits -= top[:, None]
    total[...] = np.exp(logits, out=logits).sum(axis=1)


_SUMS = Reduction(
    "softmax_sums",
    (),
    reads=("logit",),
    writes=("top", "best", "total"),
    host=_sum_up,
    # As in NumPy, NaN is the highest, and the first of equal numbers is the best.
    code="""
    struct State {
        S top, total;
        int best;
        __device__ State() : top(0), total(0), best(-1) {}
        __device__ State(S top, S total, int best) : top(top), total(total), best(best) {}
    };
    __device__ State merge(const State& a, const State& b) {
        if (a.best < 0) return b;
        if (b.best < 0) return a;
        if (a.top == b.top || (a.top != a.top && b.top != b.top))
            return State(a.top, a.total + b.total, a.best < b.best ? a.best : b.best);
        const bool is_first = a.top > b.top || a.top != a.top;
        const State& high = is_first ? a : b;
        const State& low = is_first ? b : a;
        return State(high.top, high.total + low.total * exp(low.top - high.top), high.best);
    }
    """,
    types={"top": "S", "best": "S", "total": "S"},
    indexed=True,
    element="State(S(logit), S(1), column)",
    # An infinite highest logit makes the sum NaN, since ∞ - ∞ is.
    result="top = a.top, best = a.best, total = a.total + (a.top - a.top)",
)


def _differentiate(log_sum: Array, factor: Array, place: Array, logits: Array) -> None:
    probs = logits - log_sum
    np.exp(probs, out=probs)
    columns = place.clip(0, logits.shape[1] - 1)
    probs[np.arange(len(probs)), columns[:, 0]] -= (columns == place)[:, 0]
    probs *= factor
    logits[...] = probs


_GRADIENT = Kernel(
    "cross_entropy_gradient",
    (),
    reads=("log_sum", "factor", "place"),
    writes=("logit",),
    host=_differentiate,
    code="logit = T((exp(S(logit) - log_sum) - S(column == place)) * factor);",
    types={"log_sum": "S", "factor": "S", "place": "int64"},
    indexed=True,
)
