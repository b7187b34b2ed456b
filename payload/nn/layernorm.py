"""Layer normalisation (Ba et al., arXiv:1607.06450)."""

from __future__ import annotations

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
        self.parameters = [self.gain, self.bias]

    def forward(self, x: Array, tape: Tape) -> Array:
        """(..., width) → (..., width)"""
        xp, kind = self._device.xp, wide(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        y: Array = xp.empty_like(rows)
        mean, inverse = xp.empty((2, len(rows), 1), kind)
        gain, bias = self.gain.value.astype(kind, copy=False), self.bias.value.astype(kind, copy=False)
        matmul = self._device.matmul
        share = xp.full(x.shape[-1], 1 / x.shape[-1], kind)  # a product is quicker than mean()

        def normalise(x: Array, y: Array, mean: Array, inverse: Array) -> None:
            x = x.astype(kind, copy=False)
            mean[:, 0] = matmul(x, share)
            unit = x - mean
            inverse[:, 0] = 1 / xp.sqrt(matmul(unit * unit, share) + self._eps)
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
        share, matmul = gain / x.shape[1], self._device.matmul

        def differentiate(x: Array, dy: Array, dx: Array, mean: Array, inverse: Array) -> None:
            dy = dy.astype(kind, copy=False)
            unit = x - mean
            unit *= inverse
            product = dy * unit
            ones = xp.ones(len(x), kind)
            dgain[...] += matmul(ones, product)
            dbias[...] += matmul(ones, dy)
            # of dy · gain: less its mean, and less its mean product with unit times unit
            unit *= matmul(product, share)[:, None]
            xp.multiply(dy, gain, out=product)
            product -= unit
            product -= matmul(dy, share)[:, None]
            product *= inverse
            dx[...] = product

        self._device.blocked(differentiate, x, dy.reshape(x.shape), dx, mean, inverse)
        self.gain.add(dgain)
        self.bias.add(dbias)
        return dx.reshape(dy.shape)
