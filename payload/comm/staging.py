"""Where messages are read from and written to: host memory, which for a CPU's arrays is their own.

MPI is never given device memory, since that crashes where MPI was built without CUDA: arrays of a GPU pass
through pinned host memory, which the GPU copies at full speed and beside its computation.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from payload.comm.base import Request
from payload.device.base import Array, Device

_WHOLE = slice(None)


class Staged:
    """One array of an operation, on the host: in its own memory, unless a subclass copies it."""

    def __init__(self, host: Array) -> None:
        self.host = host
        """flat; holds what was fetched, and what will be stored"""

    def fetch(self, piece: slice = _WHOLE) -> Sequence[Request]:  # noqa: ARG002
        """Begin to copy a piece from the device; ``host`` has it once the requests are done."""
        return ()

    def store(self, piece: slice = _WHOLE) -> Sequence[Request]:  # noqa: ARG002
        """Begin to copy a piece to the device."""
        return ()

    def release(self) -> None:
        """All was fetched and stored, or is being stored; ``host`` is not used any more."""


class InPlace:
    """For arrays that are in host memory, or that MPI may be given as they are.

    On a GPU they are waited for first: MPI knows nothing of streams.
    """

    def __init__(self, device: Device | None = None) -> None:
        """``device``: the GPU whose memory MPI is given."""
        self._device = device

    def of(self, array: Array) -> Staged:
        """Stage a C-contiguous array.

        Raises:
            ValueError: it is not C-contiguous.
        """
        if self._device:
            self._device.synchronize()
        return Staged(flat(array))


class Pinned:
    """For a GPU's arrays: buffers that belong to one operation each, and are then used again.

    Copies run on a stream of their own, which waits for what the computation had put on its stream before.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self.cuda = cupy.cuda
        self.stream = self.cuda.Stream(non_blocking=True)
        self._empty = importlib.import_module("cupyx").empty_pinned
        self._free: list[tuple[Array, Any]] = []  # buffers, and the events after which each may be written

    def of(self, array: Array) -> Staged:
        return _Pinned(self, flat(array))

    def take(self, nbytes: int) -> Array:
        """At least so many bytes of pinned memory, which nothing reads or writes."""
        for place, (buffer, last) in enumerate(self._free):
            if nbytes <= buffer.nbytes <= max(4 * nbytes, _SMALLEST):
                del self._free[place]
                last.synchronize()
                return buffer
        return self._empty(max(_SMALLEST, 1 << (nbytes - 1).bit_length()), np.uint8)

    def release(self, buffer: Array) -> None:
        self._free.append((buffer, self.stream.record()))


Staging = InPlace | Pinned
"""Where a communicator has its arrays staged."""

_SMALLEST = 1 << 16
_COPY_BY_ADDRESS = 4  # cudaMemcpyDefault: which side is the device's, the addresses tell


class _Pinned(Staged):
    def __init__(self, pool: Pinned, array: Array) -> None:
        self._pool = pool
        self._array = array
        self._buffer = pool.take(max(array.nbytes, 1))
        super().__init__(self._buffer[: array.nbytes].view(array.dtype))
        pool.stream.wait_event(pool.cuda.get_current_stream().record())

    def fetch(self, piece: slice = _WHOLE) -> Sequence[Request]:
        self._copy(address(self.host[piece]), address(self._array[piece]), self.host[piece].nbytes)
        return [_OnHost(self._pool.stream.record())]

    def store(self, piece: slice = _WHOLE) -> Sequence[Request]:
        self._copy(address(self._array[piece]), address(self.host[piece]), self.host[piece].nbytes)
        return [OnDevice(self._pool.stream.record(), self._pool.cuda)]

    def release(self) -> None:
        self._pool.release(self._buffer)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        stream = self._pool.stream.ptr
        self._pool.cuda.runtime.memcpyAsync(target, source, nbytes, _COPY_BY_ADDRESS, stream)


class _OnHost:
    """A copy that the host waits for, as a request."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def Test(self) -> bool:  # noqa: N802
        return bool(self._event.done)

    def Wait(self) -> None:  # noqa: N802
        self._event.synchronize()


class OnDevice:
    """What only the computation must wait for, on its stream, and not the host."""

    def __init__(self, event: Any, cuda: ModuleType) -> None:
        self._event, self._cuda = event, cuda

    def Test(self) -> bool:  # noqa: N802
        return bool(self._event.done)

    def Wait(self) -> None:  # noqa: N802
        self._cuda.get_current_stream().wait_event(self._event)


def staging_for(device: Device) -> Staging:
    """What suits a device."""
    return InPlace() if device.xp is np else Pinned(device.xp)


def flat(array: Array) -> Array:
    """A view of all numbers.

    Raises:
        ValueError: the array is not C-contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError("only a C-contiguous array can be sent or filled")
    return array.reshape(-1)


def address(array: Array) -> int:
    """Where an array of either kind begins."""
    gpu: dict[str, Any] | None = getattr(array, "__cuda_array_interface__", None)
    return int((gpu or array.__array_interface__)["data"][0])
