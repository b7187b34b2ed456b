"""Stands for a GPU where there is none: the host sees an array only when a copy, some time later, is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from payload.comm.base import Request
from payload.comm.staging import Staged, flat
from payload.device.base import Array
from tests.unit.payload.doubles.streams import Later

_GARBAGE = 0xA5


class Apart:
    """A staging whose copies are made at the third look, or when they are waited for."""

    def of(self, array: Array) -> Staged:
        return _Apart(flat(array))


class _Apart:
    def __init__(self, array: Array) -> None:
        self._array = array
        self._bytes = np.full(array.nbytes, _GARBAGE, np.uint8)
        self._copies: list[Later] = []
        self.host = self._bytes.view(array.dtype)

    def fetch(self, piece: slice = slice(None)) -> Sequence[Request]:
        return self._later(self._array[piece], self.host[piece])

    def store(self, piece: slice = slice(None)) -> Sequence[Request]:
        return self._later(self.host[piece], self._array[piece])

    def release(self) -> None:
        assert all(copy.done for copy in self._copies)
        self._bytes[...] = _GARBAGE

    def _later(self, source: Array, target: Array) -> Sequence[Request]:
        self._copies.append(Later(partial(np.copyto, target, source)))
        return [self._copies[-1]]
