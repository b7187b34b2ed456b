"""Activation functions."""

from __future__ import annotations

from collections.abc import Sequence

from payload.device import Array
from payload.nn.parameter import Parameter
from payload.nn.tape import Tape


class ReLU:
    """y = max(x, 0), in the place of x."""

    parameters: Sequence[Parameter] = ()

    def forward(self, x: Array, tape: Tape) -> Array:
        """Any shape."""
        x *= x > 0
        tape.push(x)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Same shape."""
        (y,) = tape.pop()
        dy *= y > 0
        return dy
