"""From tokens to vectors and back, with one table."""

from __future__ import annotations

import math

from payload.device.base import Array, bits
from payload.nn.module import Context, Parameter, Tape, normal, zeros

_MULTIPLE = 64
"""Of which a table has so many rows, besides one of the tensor-parallel ranks: products are faster so."""

_NEVER = -65504.0
"""The logit of what is no token: the lowest number that all formats have. Its probability is 0."""


class Embedding:
    """The row of a table for each token; tensor-parallel ranks hold parts of the vocabulary, which is padded
    for them to be even."""

    def __init__(self, context: Context, name: str, vocabulary: int, width: int) -> None:
        self._device, self._tp = context.device, context.tp
        multiple = math.lcm(_MULTIPLE, self._tp.size)
        rows = -(-vocabulary // multiple) * multiple
        self.table = Parameter(
            *(context, f"{name}.weight", (rows, width), normal(0.02)), axis=0, rows=vocabulary
        )
        self.parameters = [self.table]

    def forward(self, x: Array, tape: Tape) -> Array:
        """Tokens (B, ...), whole numbers in [0, vocabulary) → (B, ..., width)"""
        local = x.astype("int64", copy=False) - self._tp.rank * self.table.shape[0]
        here = (local >= 0) & (local < self.table.shape[0])
        local *= here  # a token of another rank's reads row 0 here, and counts for nothing
        tape.push(local, here)
        y: Array = self.table.value[local]
        if self._tp.size > 1:
            known = bits(y)
            known *= here[..., None]
            self._tp.allreduce(y)
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """(B, ..., width) → nothing of use: there is no gradient by a token."""
        local, here = tape.pop()
        xp = self._device.xp
        if self._tp.size > 1:
            dy = (bits(dy) * here[..., None]).view(dy.dtype)
        # Sorted by token, and each token's rows summed: in the same order each time, on a GPU too.
        order = xp.argsort(local.ravel(), kind="stable")
        tokens = local.ravel()[order]
        first = xp.ones(len(tokens), bool)
        first[1:] = tokens[1:] != tokens[:-1]
        starts = xp.flatnonzero(first)
        self.table.settle()
        if len(starts):
            rows = dy.reshape(-1, dy.shape[-1]).astype(self.table.grad.dtype, copy=False)[order]
            self.table.grad[tokens[starts]] += xp.add.reduceat(rows, starts, axis=0)
        return dy


class TiedHead:
    """Logits: the product with each token's vector, which is the embedding's own (Press and Wolf, 2017)."""

    def __init__(self, context: Context, name: str, embedding: Embedding, *, bias: bool = False) -> None:
        """``bias``: add a number for each token, first 0."""
        self._device, self._tp, self.table = context.device, context.tp, embedding.table
        rows, shape = self.table.rows, self.table.full_shape[:1]
        self.bias = Parameter(context, f"{name}.bias", shape, zeros, axis=0, rows=rows) if bias else None
        self.parameters = [self.table, self.bias] if self.bias else [self.table]
        self._tokens = max(0, rows - self._tp.rank * self.table.shape[0])  # here, before the padding

    def forward(self, x: Array, tape: Tape) -> Array:
        """(..., width) → (..., this rank's part of the vocabulary)"""
        tape.push(x)
        y = self._device.matmul(x.reshape(-1, x.shape[-1]), self.table.value.T)
        if self.bias:
            y += self.bias.value
        y[:, self._tokens :] = _NEVER
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, dy: Array, tape: Tape) -> Array:
        """(..., this rank's part of the vocabulary) → (..., width)"""
        (x,) = tape.pop()
        rows = dy.reshape(-1, dy.shape[-1])
        dx = self._device.matmul(rows, self.table.value)
        summed = self._tp.iallreduce(dx)
        self.table.add_product(rows, x.reshape(-1, x.shape[-1]))
        if self.bias:
            self.bias.add(rows.sum(axis=0, dtype=self.bias.grad.dtype))
        summed.wait()
        return dx.reshape(x.shape)
