"""Layer normalisation (Ba et al., arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Sequence

from payload.device import Array, wide
from payload.nn.base import Context
from payload.nn.parameter import Parameter, ones, zeros
from payload.nn.tape import Tape


class LayerNorm:
    """y = (x - mean) / √(variance + eps) · gain + bias, over the last axis; computed in at least float32."""

    def __init__(self, context: Context, name: str, width: int, *, eps: float = 1e-5) -> None:
        self._device, self._eps = context.device, eps
        self.gain = Parameter(context, f"{name}.gain", (width,), ones)
        self.bias = Parameter(context, f"{name}.bias", (width,), zeros)

    @property
    def parameters(self) -> Sequence[Parameter]:
        return [self.gain, self.bias]

    def forward(self, x: Array, tape: Tape) -> Array:
        """(..., width) → (..., width)"""
        xp, kind = self._device.xp, wide(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        y: Array = xp.empty_like(rows)
        mean, inverse = xp.empty((2, len(rows), 1), kind)
        gain, bias = self.gain.value.astype(kind, copy=False), self.bias.value.astype(kind, copy=False)

        def normalise(x: Array, y: Array, mean: Array, inverse: Array) -> None:
            x = x.astype(kind, copy=False)
            mean[...] = x.mean(axis=1, keepdims=True)
            unit = x - mean
            inverse[...] = 1 / xp.sqrt((unit * unit).mean(axis=1, keepdims=True) + self._eps)
            unit *= inverse
            unit *= gain
            unit += bias
            y[...] = unit

        self._device.blocked(normalise, rows, y, mean, inverse)
        tape.push(rows, mean, inverse)
        return y.reshape(x.shape)

    def backward(self, dy: Array, tape: Tape) -> Array:
        """(..., width) → (..., width)"""
        x, mean, inverse = tape.pop()
        xp, kind = self._device.xp, mean.dtype
        dx: Array = xp.empty_like(x)
        dgain, dbias = xp.zeros(x.shape[1], kind), xp.zeros(x.shape[1], kind)
        gain = self.gain.value.astype(kind, copy=False)

        def differentiate(x: Array, dy: Array, dx: Array, mean: Array, inverse: Array) -> None:
            dy = dy.astype(kind, copy=False)
            unit = (x - mean) * inverse
            scratch = dy * unit
            dgain[...] += scratch.sum(axis=0)
            dbias[...] += dy.sum(axis=0)
            dunit = dy * gain
            xp.multiply(dunit, unit, out=scratch)
            unit *= scratch.mean(axis=1, keepdims=True)
            dunit -= unit
            dunit -= dunit.mean(axis=1, keepdims=True)  # unit has mean 0
            dunit *= inverse
            dx[...] = dunit

        self._device.blocked(differentiate, x, dy.reshape(x.shape), dx, mean, inverse)
        self.gain.add(dgain)
        self.bias.add(dbias)
        return dx.reshape(dy.shape)
