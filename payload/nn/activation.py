"""Activation functions, and the error function (erf), which NumPy lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from payload.device.base import Array, Kernel, acc_dtype, bits
from payload.nn.module import LayerContext, Parameter, Tape


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

    exact: as in BERT and ViT. Default: that paper's tanh approximation, as in GPT-2. Both compute
    in float32 or wider. In training, ``forward`` also computes the slope dy/dx, which shares its
    exponentials with y and takes the place of x on the tape. ``backward`` may overwrite dy.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(self, context: LayerContext, *, exact: bool = False) -> None:
        self._device = context.device
        self._exact = exact
        self._kernels = _EXACT if exact else _TANH

    def forward(self, x: Array, tape: Tape) -> Array:
        if fused := self._device.fused_for(x):
            tape.push(x)
            return fused.gelu(x, exact=self._exact)
        xp = self._device.xp
        dtype = acc_dtype(x.dtype)
        kernel = self._kernels[tape.training]
        results = [xp.empty(x.shape, dtype) for _ in kernel.writes]
        flat = (xp.ascontiguousarray(array, dtype=dtype).reshape(-1) for array in (x, *results))
        self._device.apply(kernel, {}, *flat)
        y, *slope = (array.astype(x.dtype, copy=False) for array in results)
        tape.push(*slope)
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        (slope,) = tape.pop()
        if fused := self._device.fused_for(dy):
            return fused.gelu_gradient(dy, slope, exact=self._exact)
        dx = dy.astype(acc_dtype(dy.dtype), copy=False)
        dx *= slope.astype(dx.dtype, copy=False)
        return dx.astype(dy.dtype, copy=False)


_A = math.sqrt(2 / math.pi)
_B = 0.044715


def _tanh(x: Array, y: Array, slope: Array | None = None) -> None:
    """y = ½ x (1 + tanh(z)), with z = x (a + a b x²), a = √(2/π) and b = 0.044715.

    Φ = ½ (1 + tanh(z)) = 1 / (1 + exp(-2 z)). The slope is Φ + x Φ', with Φ' = 2 Φ (1 - Φ) (a + 3 a
    b x²).
    """
    square = np.multiply(x, x, out=slope)
    np.multiply(square, -2 * _A * _B, out=y)
    y -= 2 * _A
    y *= x
    # For x below -10, the exponential is infinite and Φ = 0.
    with np.errstate(over="ignore"):
        np.exp(y, out=y)
    y += 1
    np.divide(1, y, out=y)
    if slope is not None:
        slope *= 6 * _A * _B
        slope += 2 * _A
        slope *= x
        slope *= 1 - y
        slope += 1
        slope *= y
    y *= x


def _exact(x: Array, y: Array, slope: Array | None = None) -> None:
    """y = x Φ(x). The slope is Φ(x) + x φ(x), with φ the standard normal density."""
    y[...] = erf(x * math.sqrt(0.5))
    y += 1
    y *= 0.5
    if slope is not None:
        np.multiply(x, x, out=slope)
        slope *= -0.5
        np.exp(slope, out=slope)
        slope *= x
        slope *= 1 / math.sqrt(2 * math.pi)
        slope += y
    y *= x


def _kernels(name: str, host: Callable[..., None], cdf: str, slope: str) -> tuple[Kernel, Kernel]:
    """Return the kernels for evaluation and for training. cdf, slope: formulas in CUDA C."""
    code = f"const T cdf = {cdf}; y = x * cdf;"
    return (
        Kernel(name, (), reads=("x",), writes=("y",), host=host, code=code),
        Kernel(f"{name}_slope", (), ("x",), ("y", "slope"), host, f"{code} slope = {slope};"),
    )


_TANH = _kernels(
    "gelu_tanh",
    _tanh,
    cdf=f"1 / (1 + exp(-2 * x * (T({_A}) + T({_A * _B}) * x * x)))",
    slope=f"cdf * (1 + 2 * x * (1 - cdf) * (T({_A}) + T({3 * _A * _B}) * x * x))",
)
_EXACT = _kernels(
    "gelu",
    _exact,
    cdf=f"(1 + erf(x * T({math.sqrt(0.5)}))) / 2",
    slope=f"cdf + x * exp(x * x / -2) * T({1 / math.sqrt(2 * math.pi)})",
)


# Coefficients of artanh(erf(x)) / x as a polynomial in x²/8 - 1, highest power first. Fitted at
# Chebyshev points up to |x| = 4, weighted with the slope of tanh.
_ERF = (
    0.04327175968603004,
    0.060157408143779845,
    0.021601576473853547,
    0.02913430997173047,
    -0.10140513686554094,
    0.5771551198824594,
    1.8313584119237372,
)
_exact_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return erf(x): exact but slow in float64; in float32 tanh(x · polynomial in x²), errors below
    3e-7.
    """
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
