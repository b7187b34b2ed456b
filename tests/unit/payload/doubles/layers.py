"""The payload's layers, ready to run, and the slopes that their gradients should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from payload.device import Array, Device
from payload.nn.module import Draw, Unit
from payload.parallel.mesh import Options, alone
from payload.parallel.zero import Storage
from payload.precision import Precision


def stored(units: Sequence[Unit], device: Device, dtype: str = "float64") -> Storage:
    """The units' parameters and gradients in flat arrays, at the beginning of an iteration."""
    dp = alone().dp
    storage = Storage(
        device, units, dp, Options(seed=1, precision=Precision(np.dtype(dtype), np.dtype(dtype)))
    )
    storage.begin()
    return storage


def draw(count: int, device: Device) -> Draw:
    """Of ``count`` samples."""
    return Draw(seed=3, iteration=5, samples=device.asarray(np.arange(count, dtype="uint32")))


def slope(function: Callable[[], float], variable: Array, step: float = 1e-6) -> Array:
    """Central differences of a function of ``variable``, which is moved in place."""
    result = np.zeros_like(variable)
    for index in np.ndindex(variable.shape):
        value = variable[index]
        variable[index] = value + step
        above = function()
        variable[index] = value - step
        result[index] = (above - function()) / (2 * step)
        variable[index] = value
    return result
