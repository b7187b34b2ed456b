"""From images or sequences to plain rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from payload.device import Array
from payload.nn.parameter import Parameter
from payload.nn.tape import Tape


class Flat:
    """All numbers of a sample in a row, or in steps: of an image its rows."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, step: int | None = None) -> None:
        """``step``: numbers in one."""
        self._step = step

    def forward(self, x: Array, tape: Tape) -> Array:
        """(B, ...) → (B, numbers), or (B, steps, step)"""
        tape.push(x.shape)
        numbers = math.prod(x.shape[1:])
        return x.reshape(len(x), *((numbers // self._step, self._step) if self._step else (numbers,)))

    def backward(self, dy: Array, tape: Tape) -> Array:
        (shape,) = tape.pop()
        return dy.reshape(shape)
