"""Activation functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from payload.device import Array, wide
from payload.nn.base import Context
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


class GELU:
    """y = x Φ(x), Φ being the normal distribution's sum (Hendrycks and Gimpel, arXiv:1606.08415).

    Either exact, as BERT and ViT have it, or with that paper's approximation by tanh, as GPT-2 has it.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(self, context: Context, *, exact: bool = False) -> None:
        self._device = context.device
        self._share = self._exact if exact else self._tanh

    def forward(self, x: Array, tape: Tape) -> Array:
        """Any shape."""
        tape.push(x)
        y: Array = self._device.xp.empty_like(x)

        def act(x: Array, y: Array) -> None:
            x = x.astype(wide(x.dtype), copy=False)
            share, _ = self._share(x, slope=False)
            share *= x
            y[...] = share

        self._device.blocked(act, _flat(x), _flat(y))
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Same shape."""
        (x,) = tape.pop()

        def differentiate(x: Array, dy: Array) -> None:
            x = x.astype(wide(x.dtype), copy=False)
            share, slope = self._share(x, slope=True)
            slope *= x
            slope += share
            slope *= dy
            dy[...] = slope

        self._device.blocked(differentiate, _flat(x), _flat(dy))
        return dy

    def _exact(self, x: Array, *, slope: bool) -> tuple[Array, Array]:
        """Φ(x), and its slope if that is asked for."""
        share = self._device.erf(x * math.sqrt(0.5))
        share += 1
        share *= 0.5
        if not slope:
            return share, share
        density = x * x
        density *= -0.5
        self._device.xp.exp(density, out=density)
        density *= 1 / math.sqrt(2 * math.pi)
        return share, density

    def _tanh(self, x: Array, *, slope: bool) -> tuple[Array, Array]:
        """½ (1 + tanh(a (x + b x³))), and its slope ½ (1 - tanh²) a (1 + 3 b x²) if that is asked for."""
        square = x * x
        share = square * (_A * _B)
        share += _A
        share *= x
        self._device.xp.tanh(share, out=share)
        if slope:
            square *= 1.5 * _A * _B
            square += 0.5 * _A
            square -= square * (share * share)
        share += 1
        share *= 0.5
        return share, square


_A, _B = math.sqrt(2 / math.pi), 0.044715


def _flat(x: Array) -> Array:
    """Rows that are as short as can be, for work in blocks."""
    return x.reshape(-1)
