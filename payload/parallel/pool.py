"""Arrays that are used again and again for what comes and goes."""

from __future__ import annotations

from numpy.typing import DTypeLike

from payload.device import Array, Device


class Pool:
    """Flat arrays of one dtype, kept by size: a page of fresh memory costs more than its reuse."""

    def __init__(self, device: Device, dtype: DTypeLike) -> None:
        self._device, self._dtype = device, dtype
        self._free: dict[int, list[Array]] = {}
        self.nbytes = 0  # of all arrays that were made: the most that was in use at once

    def take(self, size: int) -> Array:
        """An array with any content."""
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        array: Array = self._device.xp.empty(size, self._dtype)
        self.nbytes += array.nbytes
        return array

    def give(self, array: Array) -> None:
        """Take it back."""
        self._free[len(array)].append(array)
