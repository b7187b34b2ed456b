"""The residual connection."""

from __future__ import annotations

from payload.device import Array
from payload.nn.base import Sequential
from payload.nn.tape import Tape


class Residual(Sequential):
    """y = x + f(x), f being layers one after the other. The first must not change x, nor the last dy."""

    def forward(self, x: Array, tape: Tape) -> Array:
        """Same shape."""
        y = super().forward(x, tape)
        y += x
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Same shape."""
        dx = super().backward(dy, tape)
        dx += dy
        return dx
