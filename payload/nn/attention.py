"""Multi-head self-attention (Vaswani et al., arXiv:1706.03762).

Shapes: B samples, T positions, h heads on this tensor-parallel rank, D numbers per head. The (T, T)
scores exist only for a block of queries at a time. As in Dao et al., "FlashAttention" (2022), the
backward pass recomputes the softmax from log Σ exp(scores). Scores and probabilities are float32 or
wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from payload.device.base import Array, acc_dtype
from payload.device.fused import Fused
from payload.errors import UsageError
from payload.nn.linear import Linear
from payload.nn.module import Init, LayerContext, Tape
from payload.nn.random import draw_kept, keep_mask, part_keys, sample_keys

_QUERIES = 128
_QUERIES_ON_GPU = 1024
"""Queries in a block. With causal attention, smaller blocks skip more masked scores but need more
calls.
"""


class Attention:
    """softmax(q kᵀ / √D) v in each head. A linear layer computes q, k, v; another maps the results
    to y.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        width: int,
        heads: int,
        *,
        causal: bool,
        init: Init,
        out_init: Init | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Create the two linear layers.

        Args:
            causal: whether a position attends only to itself and to earlier positions.
            out_init: initial weights of the output layer. Default: ``init``.
            dropout: share of the attention probabilities to drop in training.

        Raises:
            UsageError: ``width`` must be a multiple of ``heads``, and ``heads`` of the
                tensor-parallel size.
        """
        if width % heads:
            raise UsageError(
                f"--heads {heads}: a width of {width} cannot be divided among {heads} attention "
                "heads",
                code="heads-not-divisible",
            )
        if heads % context.tp.size:
            sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            raise UsageError(
                f"--tp {context.tp.size} does not divide the {heads} attention heads: use one of "
                f"{sizes}",
                code="tp-not-divisible",
            )
        self._device = context.device
        self._name = name
        self._causal = causal
        self._rate = dropout
        self._width = width // heads
        self._queries = _QUERIES if context.device.gpu is None else _QUERIES_ON_GPU
        self._heads = heads // context.tp.size
        self._first_head = context.tp.rank * heads // context.tp.size
        self.qkv = Linear(
            context, f"{name}.in_proj", width, 3 * width, init=init, split="columns", parts=3
        )
        self.out = Linear(
            context, f"{name}.out_proj", width, width, init=out_init or init, split="rows"
        )
        self.parameters = [*self.qkv.parameters, *self.out.parameters]

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, T, width) to y (B, T, width)."""
        xp = self._device.xp
        q, k, v = self._heads_of(self.qkv.forward(x, tape), 3)
        y = xp.empty((*x.shape[:2], self._heads * self._width), x.dtype)
        (o,) = self._heads_of(y, 1)
        log_sums = xp.empty((*q.shape[:3], 1), acc_dtype(x.dtype))
        keys = self._keys(tape)
        tape.push(q, k, v, o, log_sums, keys)
        if fused := self._fused_for(q):
            mask = self._whole_mask(q, *keys)
            fused.attend((q, k, v, *mask), (o, log_sums), **self._fused_options(mask))
        else:
            self._each_head(self._attend, q, k, v, o, log_sums, *keys)
        return self.out.forward(y, tape)

    def backward(self, dy: Array, tape: Tape) -> Array:
        do = self._heads_of(self.out.backward(dy, tape), 1)
        q, k, v, o, log_sums, keys = tape.pop()
        dqkv = self._device.xp.empty((*dy.shape[:2], 3 * self._heads * self._width), dy.dtype)
        gradients = self._heads_of(dqkv, 3)
        if fused := self._fused_for(q):
            mask = self._whole_mask(q, *keys)
            inputs = (q, k, v, o, *do, log_sums, *mask)
            fused.attend_gradients(inputs, gradients, **self._fused_options(mask))
        else:
            self._each_head(self._differentiate, q, k, v, o, log_sums, *do, *gradients, *keys)
        return self.qkv.backward(dqkv, tape)

    def _fused_for(self, q: Array) -> Fused | None:
        fused = self._device.fused_for(q)
        return fused if fused and fused.suits_attention(q) else None

    def _fused_options(self, mask: Sequence[Array]) -> dict[str, Any]:
        rate = self._rate if mask else 0.0
        return {"causal": self._causal, "scale": self._width**-0.5, "rate": rate}

    def _whole_mask(self, q: Array, *keys: Array) -> Sequence[Array]:
        """Return dropout's choice for all probabilities (B, h, T, T), 0 or 1, in a tuple that is
        empty if dropout is off. cuDNN's own choice would depend on the layout of ranks.
        """
        if not keys:
            return ()
        length = q.shape[-2]
        mask: Array = self._device.xp.empty((*q.shape[:2], length, length), q.dtype)
        places = self._places(slice(0, length), slice(0, length)).ravel()
        flat = mask.reshape(-1, places.size)
        draw_kept(self._device, keys[0].reshape(-1, 2), places, self._rate, flat)
        return (mask,)

    def _attend(
        self, q: Array, k: Array, v: Array, o: Array, log_sums: Array, *keys: Array
    ) -> None:
        """Write the heads' results to ``o``, and log Σ exp(scores) to ``log_sums``. keys: see
        ``_keys``.
        """
        xp = self._device.xp
        q = _scaled(q, self._width**-0.5)
        for rows, columns in self._blocks(q.shape[-2]):
            probs = self._scores(q, k, rows, columns)
            top = probs.max(axis=-1, keepdims=True)
            probs -= top
            xp.exp(probs, out=probs)
            # A product with this vector is faster than sum().
            total = probs @ xp.ones((columns.stop, 1), probs.dtype)
            log_sums[..., rows, :] = xp.log(total) + top
            for key in keys:
                probs *= self._mask(key, rows, columns, probs)
            parts = self._device.matmul(
                probs.astype(q.dtype, copy=False), v[..., columns, :], dtype=total.dtype
            )
            parts /= total
            o[..., rows, :] = parts

    def _differentiate(self, *arrays: Array) -> None:
        q, k, v, o, log_sums, do, dq, dk, dv, *keys = arrays
        xp = self._device.xp
        matmul = self._device.matmul
        kind = q.dtype
        scale = self._width**-0.5
        q = _scaled(q, scale)
        # The last block has all keys. As the first, it sets dk and dv, and other blocks add to
        # them.
        for rows, columns in reversed(self._blocks(q.shape[-2])):
            is_first = rows.stop == q.shape[-2]
            probs = self._scores(q, k, rows, columns)
            probs -= log_sums[..., rows, :]
            xp.exp(probs, out=probs)
            dprobs = matmul(
                do[..., rows, :], v[..., columns, :].swapaxes(-1, -2), dtype=probs.dtype
            )
            dropped_probs = probs
            for key in keys:
                mask = self._mask(key, rows, columns, probs)
                dprobs *= mask
                dropped_probs = probs * mask
            dropped_probs = dropped_probs.astype(kind, copy=False)
            self._add_product(dropped_probs, do[..., rows, :], dv[..., columns, :], is_first)
            # Σ probs · dprobs over the keys equals Σ o · do over the numbers of the head.
            dprobs -= (o[..., rows, :] * do[..., rows, :]).sum(
                axis=-1, keepdims=True, dtype=probs.dtype
            )
            dprobs *= probs
            dscores = dprobs.astype(kind, copy=False)
            dq[..., rows, :] = matmul(dscores, k[..., columns, :])
            self._add_product(dscores, q[..., rows, :], dk[..., columns, :], is_first)
        dq *= scale

    def _add_product(self, left: Array, right: Array, total: Array, is_first: bool) -> None:
        """Add leftᵀ @ right to ``total``, or if ``is_first``, set ``total`` to it."""
        if is_first:
            self._device.matmul(left.swapaxes(-1, -2), right, out=total)
        else:
            total += self._device.matmul(left.swapaxes(-1, -2), right)

    def _scores(self, q: Array, k: Array, rows: slice, columns: slice) -> Array:
        """Return q kᵀ of these rows, columns, with -inf for keys after the query if attention is
        causal.
        """
        scores = self._device.matmul(
            q[..., rows, :], k[..., columns, :].swapaxes(-1, -2), dtype=acc_dtype(q.dtype)
        )
        if self._causal:
            square = scores[..., rows.start :]
            self._device.xp.fmin(square, _limits(self._device.xp, scores.shape[-2]), out=square)
        return scores

    def _mask(self, key: Array, rows: slice, columns: slice, probs: Array) -> Array:
        """Return dropout's factors for ``probs``: 0 or 1 / (1 - rate), by position in the (T, T)
        matrix.
        """
        mask: Array = keep_mask(key, self._places(rows, columns), self._rate).astype(probs.dtype)
        mask *= 1 / (1 - self._rate)
        return mask

    def _places(self, rows: slice, columns: slice) -> Array:
        """Return a number for each place in these rows and columns of the (T, T) matrix."""
        arange = self._device.xp.arange
        row_places = arange(rows.start, rows.stop, dtype="uint32")[:, None]
        # Sequences are shorter than 2¹⁶, so each place in (T, T) has its own 32-bit number.
        row_places *= 1 << 16
        places: Array = row_places + arange(columns.stop, dtype="uint32")
        return places

    def _blocks(self, length: int) -> list[tuple[slice, slice]]:
        """Return two slices for each block: its queries, and the keys that these queries attend
        to.
        """
        stops = [min(start + self._queries, length) for start in range(0, length, self._queries)]
        starts = range(0, length, self._queries)
        return [
            (slice(start, stop), slice(0, stop if self._causal else length))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _keys(self, tape: Tape) -> Sequence[Array]:
        """Return the keys of dropout's random numbers (B, h, 2) in a tuple, empty if dropout is
        off.
        """
        if not self._rate or not tape.training or tape.draw is None:
            return ()
        keys = sample_keys(tape.draw, self._name)
        return (part_keys(self._device, keys, self._first_head, self._heads),)

    def _heads_of(self, x: Array, parts: int) -> list[Array]:
        """Split x (B, T, parts · h · D) into ``parts`` views (B, h, T, D)."""
        split = x.reshape(*x.shape[:2], parts, self._heads, self._width)
        return [split[:, :, i].swapaxes(1, 2) for i in range(parts)]

    def _each_head(self, function: Callable[..., None], *arrays: Array) -> None:
        """Call a function on blocks of arrays (B, h, ...): as many samples and heads as suit the
        device.
        """

        def sample(*blocks: Array) -> None:
            self._device.blocked(function, *(array.swapaxes(0, 1) for array in blocks))

        self._device.blocked(sample, *arrays)


@cache
def _limits(xp: ModuleType, size: int) -> Array:
    """Return a (size, size) matrix of -inf for keys after the query, and inf for the other keys."""
    return xp.where(xp.triu(xp.ones((size, size), bool), 1), -math.inf, math.inf).astype("float32")


def _scaled(q: Array, scale: float) -> Array:
    # In place, because bfloat16 times a Python float would be wider.
    scaled: Array = q.copy()
    scaled *= scale
    return scaled
