"""The error function, which NumPy lacks and CUDA has."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray


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
