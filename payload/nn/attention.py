"""Multi-head self-attention (Vaswani et al., arXiv:1706.03762).

B samples of T positions; tensor-parallel ranks hold h heads each, of D numbers. Nothing of T x T outlives a
block of queries: as in Dao et al., "FlashAttention" (2022), the backward pass computes the probabilities
again from the logarithms of their sums. Scores and probabilities are of at least float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

from payload.device.base import Array, acc_dtype
from payload.errors import UsageError
from payload.nn.linear import Linear
from payload.nn.module import Context, Init, Tape
from payload.nn.random import kept, part_keys, sample_keys

_QUERIES, _QUERIES_ON_GPU = 128, 1024
"""In one block: for causal attention, fewer save more of the scores that are 0, and cost more calls."""


class Attention:
    """y = softmax(q kᵀ / √D) v in each head, with q, k, v and the result each through a linear layer."""

    def __init__(
        self,
        context: Context,
        name: str,
        width: int,
        heads: int,
        *,
        causal: bool,
        init: Init,
        out_init: Init | None = None,
        dropout: float = 0.0,
    ) -> None:
        """
        Args:
            causal: a position sees itself and those before it, not those after it.
            out_init: of the last linear layer, if not ``init``.
            dropout: the share of the softmax's results to drop in training.

        Raises:
            UsageError: the heads divide neither the width nor evenly over the tensor-parallel ranks.
        """
        if width % heads:
            raise UsageError(
                f"a width of {width} cannot be divided among {heads} heads of attention",
                code="heads-not-divisible",
            )
        if heads % context.tp.size:
            able = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            raise UsageError(
                f"--tp {context.tp.size} does not divide the {heads} heads of attention: it can be {able}",
                code="tp-not-divisible",
            )
        self._device, self._name, self._causal, self._rate = context.device, name, causal, dropout
        self._width = width // heads
        self._queries = _QUERIES if context.device.gpu is None else _QUERIES_ON_GPU
        self._heads, self._first_head = heads // context.tp.size, context.tp.rank * heads // context.tp.size
        self.qkv = Linear(context, f"{name}.in_proj", width, 3 * width, init=init, split="columns", parts=3)
        self.out = Linear(context, f"{name}.out_proj", width, width, init=out_init or init, split="rows")
        self.parameters = [*self.qkv.parameters, *self.out.parameters]

    def forward(self, x: Array, tape: Tape) -> Array:
        """(B, T, width) → (B, T, width)"""
        xp = self._device.xp
        q, k, v = self._heads_of(self.qkv.forward(x, tape), 3)
        y = xp.empty((*x.shape[:2], self._heads * self._width), x.dtype)
        (o,) = self._heads_of(y, 1)
        log_sums = xp.empty((*q.shape[:3], 1), acc_dtype(x.dtype))
        keys = self._keys(tape)
        tape.push(q, k, v, o, log_sums, keys)
        self._each_head(self._attend, q, k, v, o, log_sums, *keys)
        return self.out.forward(y, tape)

    def backward(self, dy: Array, tape: Tape) -> Array:
        """(B, T, width) → (B, T, width)"""
        do = self._heads_of(self.out.backward(dy, tape), 1)
        q, k, v, o, log_sums, keys = tape.pop()
        dqkv = self._device.xp.empty((*dy.shape[:2], 3 * self._heads * self._width), dy.dtype)
        gradients = self._heads_of(dqkv, 3)
        self._each_head(self._differentiate, q, k, v, o, log_sums, *do, *gradients, *keys)
        return self.qkv.backward(dqkv, tape)

    def _attend(self, q: Array, k: Array, v: Array, o: Array, log_sums: Array, *keys: Array) -> None:
        """Of some heads of some samples, in any order of the first two axes: set ``o`` and ``log_sums``.

        ``keys``: what ``_keys`` gave.
        """
        xp = self._device.xp
        q = _scaled(q, self._width**-0.5)
        for at, seen in self._blocks(q.shape[-2]):
            probs = self._scores(q, k, at, seen)
            top = probs.max(axis=-1, keepdims=True)
            probs -= top
            xp.exp(probs, out=probs)
            total = probs.sum(axis=-1, keepdims=True)
            log_sums[..., at, :] = xp.log(total) + top
            for key in keys:
                probs *= self._mask(key, at, seen, probs)
            parts = self._device.matmul(probs.astype(q.dtype, copy=False), v[..., seen, :], dtype=total.dtype)
            parts /= total
            o[..., at, :] = parts

    def _differentiate(self, *arrays: Array) -> None:
        """Likewise: given the arrays of ``_attend`` and the gradient by ``o``, set those by q, k and v."""
        q, k, v, o, log_sums, do, dq, dk, dv, *keys = arrays
        xp, matmul, kind = self._device.xp, self._device.matmul, q.dtype
        scale = self._width**-0.5
        q = _scaled(q, scale)
        dk[...] = 0
        dv[...] = 0
        for at, seen in self._blocks(q.shape[-2]):
            probs = self._scores(q, k, at, seen)
            probs -= log_sums[..., at, :]
            xp.exp(probs, out=probs)
            dprobs = matmul(do[..., at, :], v[..., seen, :].swapaxes(-1, -2), dtype=probs.dtype)
            used = probs
            for key in keys:
                mask = self._mask(key, at, seen, probs)
                dprobs *= mask
                used = probs * mask
            dv[..., seen, :] += matmul(used.swapaxes(-1, -2).astype(kind, copy=False), do[..., at, :])
            # Σ probs · dprobs over the keys is Σ o · do over the head's numbers
            dprobs -= (o[..., at, :] * do[..., at, :]).sum(axis=-1, keepdims=True, dtype=probs.dtype)
            dprobs *= probs
            dscores = dprobs.astype(kind, copy=False)
            dq[..., at, :] = matmul(dscores, k[..., seen, :])
            dk[..., seen, :] += matmul(dscores.swapaxes(-1, -2), q[..., at, :])
        dq *= scale

    def _scores(self, q: Array, k: Array, at: slice, seen: slice) -> Array:
        """(..., queries, keys), -inf for keys that a query does not see."""
        scores = self._device.matmul(
            q[..., at, :], k[..., seen, :].swapaxes(-1, -2), dtype=acc_dtype(q.dtype)
        )
        if self._causal:
            later = _later(self._device.xp, scores.shape[-2])
            self._device.xp.copyto(scores[..., at.start :], -math.inf, where=later)
        return scores

    def _mask(self, key: Array, at: slice, seen: slice, probs: Array) -> Array:
        """What dropout multiplies the probabilities by, drawn by their places in their head's (T, T)."""
        arange = self._device.xp.arange
        rows = arange(at.start, at.stop, dtype="uint32")[:, None]
        rows *= 1 << 16  # no longer sequence has been attended to as a whole
        places = rows + arange(seen.stop, dtype="uint32")
        mask: Array = kept(key, places, self._rate).astype(probs.dtype)
        mask *= 1 / (1 - self._rate)
        return mask

    def _blocks(self, length: int) -> list[tuple[slice, slice]]:
        """Blocks of queries, and for each the keys that any of them sees."""
        stops = [min(start + self._queries, length) for start in range(0, length, self._queries)]
        starts = range(0, length, self._queries)
        return [
            (slice(start, stop), slice(0, stop if self._causal else length))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _keys(self, tape: Tape) -> Sequence[Array]:
        """(B, h, 2) for the random numbers, or nothing where nothing is dropped."""
        if not self._rate or not tape.training or tape.draw is None:
            return ()
        keys = sample_keys(tape.draw, self._name)
        return (part_keys(self._device, keys, self._first_head, self._heads),)

    def _heads_of(self, x: Array, parts: int) -> list[Array]:
        """(B, T, parts · h · D) → for each part a view (B, h, T, D)"""
        split = x.reshape(*x.shape[:2], parts, self._heads, self._width)
        return [split[:, :, i].swapaxes(1, 2) for i in range(parts)]

    def _each_head(self, function: Callable[..., None], *arrays: Array) -> None:
        """Call it on arrays (B, h, ...), for as many samples and heads at once as is fast here."""

        def sample(*some: Array) -> None:
            self._device.blocked(function, *(array.swapaxes(0, 1) for array in some))

        self._device.blocked(sample, *arrays)


@cache
def _later(xp: ModuleType, size: int) -> Array:
    """(queries, keys) of the same positions: whether the key is later."""
    return xp.triu(xp.ones((size, size), bool), 1)


def _scaled(q: Array, scale: float) -> Array:
    """Of the same dtype, unlike a product of bfloat16 with Python's float."""
    scaled: Array = q.copy()
    scaled *= scale
    return scaled
