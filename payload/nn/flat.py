"""From images or sequences to plain rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from payload.device import Array
from payload.nn.parameter import Parameter
from payload.nn.tape import Tape


class Flat:
    """All numbers of a sample in a row."""

    parameters: Sequence[Parameter] = ()

    def forward(self, x: Array, tape: Tape) -> Array:
        """(B, ...) → (B, numbers)"""
        tape.push(x.shape)
        return x.reshape(len(x), math.prod(x.shape[1:]))

    def backward(self, dy: Array, tape: Tape) -> Array:
        (shape,) = tape.pop()
        return dy.reshape(shape)
