"""Token embedding, and the output layer that shares its table."""

from __future__ import annotations

import math

from payload.device.base import Array, bits
from payload.nn.module import LayerContext, Parameter, Tape, normal, zeros

_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this and of the tensor-parallel size, for faster
products.
"""
_NEVER = -65504.0
"""Logit of padding rows: the lowest number of every supported format, so that their probability is
0.
"""


class Embedding:
    """Map each token to its row of a table. Each tensor-parallel rank holds a part of the padded
    table.
    """

    def __init__(self, context: LayerContext, name: str, vocabulary: int, width: int) -> None:
        self._device = context.device
        self._tp = context.tp
        multiple = math.lcm(_MULTIPLE, self._tp.size)
        rows = -(-vocabulary // multiple) * multiple
        self.table = Parameter(
            context,
            f"{name}.weight",
            (rows, width),
            normal(0.02),
            axis=0,
            rows=vocabulary,
        )
        self.parameters = [self.table]

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map tokens (B, ...), integers in [0, vocabulary), to vectors (B, ..., width)."""
        local = x.astype("int64", copy=False) - self._tp.rank * self.table.shape[0]
        is_local = (local >= 0) & (local < self.table.shape[0])
        # Tokens of other ranks read row 0; their vectors are set to 0 below.
        local *= is_local
        tape.push(local, is_local)
        y: Array = self.table.value[local]
        if self._tp.size > 1:
            y_bits = bits(y)
            y_bits *= is_local[..., None]
            self._tp.allreduce(y)
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Add dy to the table's gradient. The result means nothing, because tokens have no
        gradient.
        """
        local, is_local = tape.pop()
        if self._tp.size > 1:
            dy = (bits(dy) * is_local[..., None]).view(dy.dtype)
        self.table.zero_unset_grad()
        self._device.add_rows(dy.reshape(-1, dy.shape[-1]), local.ravel(), self.table.grad)
        return dy


class TiedHead:
    """Logits: products of x and all tokens' embedding vectors (weight tying; Press and Wolf,
    2017).
    """

    def __init__(
        self, context: LayerContext, name: str, embedding: Embedding, *, bias: bool = False
    ) -> None:
        """Create the layer. bias: whether to add a trained number, initially 0, to each token's
        logit.
        """
        self._device = context.device
        self._tp = context.tp
        self.table = embedding.table
        rows = self.table.rows
        shape = self.table.full_shape[:1]
        self.bias = (
            Parameter(context, f"{name}.bias", shape, zeros, axis=0, rows=rows) if bias else None
        )
        self.parameters = [self.table, self.bias] if self.bias else [self.table]
        # Rows of this rank that are tokens, without padding.
        self._tokens = max(0, rows - self._tp.rank * self.table.shape[0])

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (..., width) to logits (..., this rank's part of the vocabulary)."""
        tape.push(x)
        bias = self.bias.value if self.bias else None
        y = self._device.linear(x.reshape(-1, x.shape[-1]), self.table.value.T, bias)
        y[:, self._tokens :] = _NEVER
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def backward(self, dy: Array, tape: Tape) -> Array:
        (x,) = tape.pop()
        rows = dy.reshape(-1, dy.shape[-1])
        dx = self._device.matmul(rows, self.table.value)
        summed = self._tp.iallreduce(dx)
        self.table.add_product(rows, x.reshape(-1, x.shape[-1]))
        if self.bias:
            self.bias.add(rows.sum(axis=0, dtype=self.bias.grad.dtype))
        summed.wait()
        return dx.reshape(x.shape)
