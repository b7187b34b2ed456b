"""Arrays that are used again and again for what comes and goes."""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike

from payload.device import Array, Device

_SLACK = 16
"""A sixteenth more is made than asked for, so that what is a little larger fits, too."""


class Pool:
    """Flat arrays of one dtype, which are kept: a page of fresh memory costs more than its reuse."""

    def __init__(self, device: Device, dtype: DTypeLike) -> None:
        self._device, self._dtype = device, dtype
        self._free: list[Array] = []
        self.nbytes = 0  # of all arrays that were made

    def take(self, size: int) -> Array:
        """An array with any content: a view of one that may be larger, but not by far."""
        fitting = [n for n, array in enumerate(self._free) if size <= len(array) <= 2 * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda n: len(self._free[n])))[:size]
        array: Array = self._device.xp.empty(size + size // _SLACK, self._dtype)
        self.nbytes += array.nbytes
        return array[:size]

    def give(self, array: Array) -> None:
        """Take it back."""
        whole: Any = array.base
        self._free.append(whole)
