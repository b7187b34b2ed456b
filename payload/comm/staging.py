"""Host memory for sent and received messages (staging). For arrays on a CPU this is the arrays' own
memory.

MPI never gets GPU memory, which crashes an MPI built without CUDA. Instead, arrays on a GPU are
copied to and from pinned host memory. A GPU copies pinned memory at full speed, in parallel with
its computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from payload.comm.base import MpiRequest
from payload.device.base import Array, Device

_WHOLE = slice(None)


class HostStaging:
    """Host memory for an array's messages: the array's own memory, unless a subclass copies the
    array.
    """

    def __init__(self, host: Array) -> None:
        self.host = host
        """Flat array of the numbers that were fetched, or that will be stored."""

    def fetch(self, piece: slice = _WHOLE) -> Sequence[MpiRequest]:  # noqa: ARG002
        """Start copying a piece of the array to ``host``. The returned requests are done after the
        copy.
        """
        return ()

    def store(self, piece: slice = _WHOLE) -> Sequence[MpiRequest]:  # noqa: ARG002
        """Start copying a piece of ``host`` to the device. The returned requests are done after the
        copy.
        """
        return ()

    def release(self) -> None:
        """Release ``host``. All fetches must be done, and all stores must have been started."""


class InPlace:
    """Staging without copies, for arrays in host memory, or in GPU memory that MPI can use
    directly.

    On a GPU, staging first waits until the computation is done, because MPI does not know CUDA
    streams.
    """

    def __init__(self, device: Device | None = None) -> None:
        """Create the staging. device: the GPU that holds the arrays. Default: arrays are in host
        memory.
        """
        self._device = device

    def of(self, array: Array) -> HostStaging:
        """Prepare a C-contiguous array for messages. Raise ValueError for any other layout."""
        if self._device:
            self._device.synchronize()
        return HostStaging(flat(array))


class PinnedStaging:
    """Staging for arrays on a GPU: each operation gets a pinned host buffer, which later operations
    reuse.

    Copies run on a separate stream, after the work that is already queued on the computing stream.
    """

    def __init__(self, cupy: ModuleType) -> None:
        from cupyx import empty_pinned

        self.cuda = cupy.cuda
        self.stream = self.cuda.Stream(non_blocking=True)
        self._empty = empty_pinned
        # Buffers, each with the event after which it may be overwritten.
        self._free: list[tuple[Array, Any]] = []

    def of(self, array: Array) -> HostStaging:
        return _Pinned(self, flat(array))

    def take(self, nbytes: int) -> Array:
        """Return an unused pinned buffer of at least ``nbytes`` bytes."""
        for index, (buffer, last_use) in enumerate(self._free):
            if nbytes <= buffer.nbytes <= max(4 * nbytes, _SMALLEST):
                del self._free[index]
                last_use.synchronize()
                return buffer
        return self._empty(max(_SMALLEST, 1 << (nbytes - 1).bit_length()), np.uint8)

    def release(self, buffer: Array) -> None:
        self._free.append((buffer, self.stream.record()))


Staging = InPlace | PinnedStaging
"""How a communicator stages its arrays."""

_SMALLEST = 1 << 16
# cudaMemcpyDefault: the direction follows from the addresses.
_COPY_BY_ADDRESS = 4


class _Pinned(HostStaging):
    def __init__(self, pool: PinnedStaging, array: Array) -> None:
        self._pool = pool
        self._array = array
        self._buffer = pool.take(max(array.nbytes, 1))
        super().__init__(self._buffer[: array.nbytes].view(array.dtype))
        pool.stream.wait_event(pool.cuda.get_current_stream().record())

    def fetch(self, piece: slice = _WHOLE) -> Sequence[MpiRequest]:
        self._copy(address(self.host[piece]), address(self._array[piece]), self.host[piece].nbytes)
        return [_OnHost(self._pool.stream.record())]

    def store(self, piece: slice = _WHOLE) -> Sequence[MpiRequest]:
        self._copy(address(self._array[piece]), address(self.host[piece]), self.host[piece].nbytes)
        return [OnDevice(self._pool.stream.record(), self._pool.cuda)]

    def release(self) -> None:
        self._pool.release(self._buffer)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        stream = self._pool.stream.ptr
        self._pool.cuda.runtime.memcpyAsync(target, source, nbytes, _COPY_BY_ADDRESS, stream)


class _OnHost:
    """A copy in progress, with the methods of an MPI request. ``Wait`` blocks the host."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def Test(self) -> bool:  # noqa: N802
        return bool(self._event.done)

    def Wait(self) -> None:  # noqa: N802
        self._event.synchronize()


class OnDevice:
    """GPU work in progress, with the methods of an MPI request. ``Wait`` blocks the stream, not the
    host.
    """

    def __init__(self, event: Any, cuda: ModuleType) -> None:
        self._event = event
        self._cuda = cuda

    def Test(self) -> bool:  # noqa: N802
        return bool(self._event.done)

    def Wait(self) -> None:  # noqa: N802
        self._cuda.get_current_stream().wait_event(self._event)


def staging_for(device: Device) -> Staging:
    return InPlace() if device.xp is np else PinnedStaging(device.xp)


def flat(array: Array) -> Array:
    """Return a flat view of a C-contiguous array. Raise ValueError for any other layout."""
    if not array.flags.c_contiguous:
        raise ValueError("only a C-contiguous array can be sent or filled")
    return array.reshape(-1)


def address(array: Array) -> int:
    """Return the address of an array's first byte, in host or device memory."""
    gpu: dict[str, Any] | None = getattr(array, "__cuda_array_interface__", None)
    return int((gpu or array.__array_interface__)["data"][0])
