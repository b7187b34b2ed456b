"""Activation functions, and the error function, which NumPy lacks and CUDA has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from payload.device.base import Array, Kernel, acc_dtype, bits
from payload.nn.module import Context, Parameter, Tape


class ReLU:
    """y = max(x, 0), in the place of x."""

    parameters: Sequence[Parameter] = ()

    def forward(self, x: Array, tape: Tape) -> Array:
        """Any shape."""
        kept = bits(x)
        kept *= ~(x <= 0)
        tape.push(x)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Same shape."""
        (y,) = tape.pop()
        kept = bits(dy)
        kept *= y != 0  # NaN, too
        return dy


class GELU:
    """y = x Φ(x), Φ being the normal distribution's sum (Hendrycks and Gimpel, arXiv:1606.08415).

    Either exact, as BERT and ViT have it, or with that paper's approximation by tanh, as GPT-2 has it; in at
    least float32.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(self, context: Context, *, exact: bool = False) -> None:
        self._device = context.device
        self._forward, self._backward = (_EXACT, _EXACT_SLOPE) if exact else (_TANH, _TANH_SLOPE)

    def forward(self, x: Array, tape: Tape) -> Array:
        """Any shape."""
        tape.push(x)
        y: Array = self._device.xp.empty(x.shape, acc_dtype(x.dtype))
        self._device.apply(self._forward, {}, self._flat(x), y.reshape(-1))
        return y.astype(x.dtype, copy=False)

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Same shape; in the place of dy."""
        (x,) = tape.pop()
        dx = self._flat(dy)
        self._device.apply(self._backward, {}, self._flat(x), dx)
        return dx.astype(dy.dtype, copy=False).reshape(dy.shape)

    def _flat(self, x: Array) -> Array:
        flat: Array = self._device.xp.ascontiguousarray(x, dtype=acc_dtype(x.dtype))
        return flat.reshape(-1)


_A, _B = math.sqrt(2 / math.pi), 0.044715


def _tanh(x: Array, y: Array) -> None:
    """½ x (1 + tanh(a (x + b x³)))"""
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
    """Φ(x) + x φ(x), φ being the density."""
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


def erf(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Of float32, to 3e-7: tanh of x times a polynomial in x², which needs few terms. Of float64, to 2e-14: x
    times a longer polynomial, since near 1 the inverse of tanh is not to be had to 16 digits."""
    single = x.dtype.itemsize == 4  # noqa: PLR2004
    end = _end(single)
    x = np.clip(x, -end, end)
    u = x * x
    u *= 2 / end**2
    u -= 1  # in [-1, 1]
    first, *others = _coefficients(single)
    y = np.full_like(x, first)
    for coefficient in others:
        y *= u
        y += coefficient
    y *= x
    return np.tanh(y, out=y) if single else y


def _end(single: bool) -> float:
    """Beyond it, erf is ±1."""
    return 4.0 if single else 5.9


@cache
def _coefficients(single: bool) -> list[float]:
    """Of the polynomial, the highest power first."""
    nodes = chebyshev.chebpts1(200)
    points = [float(_end(single) * math.sqrt((node + 1) / 2)) for node in nodes]
    if single:
        values = [math.log((1 + math.erf(x)) / math.erfc(x)) / 2 / x for x in points]  # artanh(erf(x)) / x
        weights = [x * math.erfc(x) * (1 + math.erf(x)) for x in points]  # the slope of tanh there
        fitted = chebyshev.chebfit(nodes, values, 6, w=weights)
    else:
        fitted = chebyshev.chebfit(nodes, [math.erf(x) / x for x in points], 40)
    return [float(value) for value in chebyshev.cheb2poly(fitted)[::-1]]
