"""Activation functions, and the error function (erf), which NumPy lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from payload.device.base import Array, Kernel, acc_dtype, bits
from payload.nn.module import Context, Parameter, Tape


class ReLU:
    """y = max(x, 0) for arrays of any shape. y overwrites x, and dx overwrites dy."""

    parameters: Sequence[Parameter] = ()

    def forward(self, x: Array, tape: Tape) -> Array:
        x_bits = bits(x)
        x_bits *= ~(x <= 0)
        tape.push(x)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:
        (y,) = tape.pop()
        dy_bits = bits(dy)
        # The gradient is 0 only if y = 0, not if y is NaN.
        dy_bits *= y != 0
        return dy


class GELU:
    """y = x Φ(x), with Φ the standard normal CDF (Hendrycks and Gimpel, arXiv:1606.08415).

    exact: as in BERT and ViT. Default: that paper's tanh approximation, as in GPT-2. Both compute in float32
    or wider. ``backward`` may overwrite dy.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(self, context: Context, *, exact: bool = False) -> None:
        self._device = context.device
        self._forward, self._backward = (_EXACT, _EXACT_SLOPE) if exact else (_TANH, _TANH_SLOPE)

    def forward(self, x: Array, tape: Tape) -> Array:
        tape.push(x)
        y: Array = self._device.xp.empty(x.shape, acc_dtype(x.dtype))
        self._device.apply(self._forward, {}, self._flat(x), y.reshape(-1))
        return y.astype(x.dtype, copy=False)

    def backward(self, dy: Array, tape: Tape) -> Array:
        (x,) = tape.pop()
        dx = self._flat(dy)
        self._device.apply(self._backward, {}, self._flat(x), dx)
        return dx.astype(dy.dtype, copy=False).reshape(dy.shape)

    def _flat(self, x: Array) -> Array:
        flat: Array = self._device.xp.ascontiguousarray(x, dtype=acc_dtype(x.dtype))
        return flat.reshape(-1)


_A, _B = math.sqrt(2 / math.pi), 0.044715


def _tanh(x: Array, y: Array) -> None:
    """y = ½ x (1 + tanh(a (x + b x³))), with a = √(2/π) and b = 0.044715."""
    np.multiply(x, x, out=y)
    y *= _A * _B
    y += _A
    y *= x
    np.tanh(y, out=y)
    y += 1
    y *= x
    y *= 0.5


def _tanh_slope(x: Array, dy: Array) -> None:
    square = x * x
    share = square * (_A * _B)
    share += _A
    share *= x
    np.tanh(share, out=share)
    square *= 3 * _A * _B
    square += _A
    square *= x
    square *= 1 - share * share
    square += share
    square += 1
    dy *= square
    dy *= 0.5


def _exact(x: Array, y: Array) -> None:
    y[...] = erf(x * math.sqrt(0.5))
    y += 1
    y *= x
    y *= 0.5


def _exact_slope(x: Array, dy: Array) -> None:
    """Multiply dy by Φ(x) + x φ(x), with φ the standard normal density."""
    slope = erf(x * math.sqrt(0.5))
    slope += 1
    slope *= 0.5
    density = x * x
    density *= -0.5
    np.exp(density, out=density)
    density *= x
    density *= 1 / math.sqrt(2 * math.pi)
    slope += density
    dy *= slope


def _kernel(name: str, host: Callable[[Array, Array], None], writes: str, code: str) -> Kernel:
    return Kernel(name, (), reads=("x",), writes=(writes,), host=host, code=code)


_TANH = _kernel("gelu_tanh", _tanh, "y", f"y = x / 2 * (1 + tanh(x * (T({_A}) + T({_A * _B}) * x * x)));")
_TANH_SLOPE = _kernel(
    "gelu_tanh_slope",
    _tanh_slope,
    "dy",
    f"""
    const T t = tanh(x * (T({_A}) + T({_A * _B}) * x * x));
    dy *= (1 + t + x * (1 - t * t) * (T({_A}) + T({3 * _A * _B}) * x * x)) / 2;
    """,
)
_EXACT = _kernel("gelu", _exact, "y", f"y = x / 2 * (1 + erf(x * T({math.sqrt(0.5)})));")
_EXACT_SLOPE = _kernel(
    "gelu_slope",
    _exact_slope,
    "dy",
    f"""
    const T density = exp(x * x / -2) * T({1 / math.sqrt(2 * math.pi)});
    dy *= (1 + erf(x * T({math.sqrt(0.5)}))) / 2 + x * density;
    """,
)


# Coefficients of artanh(erf(x)) / x as a polynomial in x²/8 - 1, highest power first. Fitted at Chebyshev
# points up to |x| = 4, weighted with the slope of tanh.
_ERF = (
    *(0.04327175968603004, 0.060157408143779845, 0.021601576473853547, 0.02913430997173047),
    *(-0.10140513686554094, 0.5771551198824594, 1.8313584119237372),
)
_exact_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return erf(x): exact but slow in float64; in float32 tanh(x · polynomial in x²), errors below 3e-7."""
    if x.dtype.itemsize > 4:  # noqa: PLR2004
        return _exact_erf(x).astype(x.dtype)
    x = np.clip(x, -4.0, 4.0)
    u = x * x
    u *= 1 / 8
    u -= 1
    y = np.full_like(x, _ERF[0])
    for coefficient in _ERF[1:]:
        y *= u
        y += coefficient
    y *= x
    return np.tanh(y, out=y)
