"""Where arrays live and are computed with: the interface, which NumPy on the host has.

MPI is never given device memory, since that crashes where MPI was built without CUDA: arrays of a GPU are
staged through pinned host memory, which the GPU copies at full speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from payload.node.host import host_memory_bytes

Array = NDArray[Any]
"""NumPy's array or CuPy's, which has the same methods."""

GpuFacts = dict[str, str | int | None]
"""index, name and uuid"""

Mark = Any
"""A point in time, which only its device understands."""

FLOAT32 = np.dtype("float32")

_BLOCK_BYTES = 1 << 18
"""Rows that are worked on at once on a CPU: they and what comes of them stay in the second-level cache."""

_MATRIX_BYTES = 1 << 20
"""Of a temporary matrix on a CPU: it stays in the second-level cache, or nearly."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A formula for each element of equally long arrays, in one pass through memory.

    ``host`` computes it for blocks of NumPy arrays, which it is given in this order, and scalars by name.
    ``code`` says the same in CUDA C for one element, where arrays have names too. ``writes`` may be read.
    """

    name: str
    scalars: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    host: Callable[..., None]
    code: str


class Device:
    """Where arrays live and are computed with: NumPy and the memory of the host, but for subclasses."""

    xp: ModuleType = np
    """numpy or cupy"""
    gpu: GpuFacts | None = None
    """None on a CPU"""
    note: str = ""
    """why it is this one, in words"""

    def asarray(self, host: Array, dtype: DTypeLike | None = None) -> Array:
        """A host array, on the device."""
        return np.asarray(host, dtype=dtype)

    def to_host(self, array: Array) -> Array:
        """A device array, on the host; valid until the next call with an array of that size and dtype."""
        return array

    def matmul(
        self, left: Array, right: Array, out: Array | None = None, dtype: DTypeLike | None = None
    ) -> Array:
        """left @ right, summed in at least float32, as ``dtype`` (by default the factors')."""
        wanted = np.dtype(dtype) if dtype is not None else out.dtype if out is not None else left.dtype
        if left.dtype.itemsize < FLOAT32.itemsize:  # BLAS knows none of those
            left, right = left.astype(FLOAT32), right.astype(FLOAT32)
        if out is not None and out.dtype == left.dtype:
            return np.matmul(left, right, out=out)
        product: Array = (left @ right).astype(wanted, copy=False)
        if out is None:
            return product
        out[...] = product
        return out

    def blocked(self, function: Callable[..., None], *arrays: Array) -> None:
        """Call ``function`` on the same rows of all arrays, as many at once as is fast here.

        It must treat rows alike, and write its results into rows that it was given or add them up.
        """
        rows = len(arrays[0])
        row_bytes = sum(array.nbytes for array in arrays) // max(rows, 1)
        step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
        for start in range(0, rows, step):
            function(*(array[start : start + step] for array in arrays))

    def block_rows(self, row_bytes: int) -> int:
        """How many rows of a temporary matrix to make before they are used."""
        return max(1, _MATRIX_BYTES // row_bytes)

    def apply(self, kernel: Kernel, scalars: Mapping[str, float], *arrays: Array) -> None:
        """Run a kernel over arrays of one dtype, (N,) each: those it reads, then those it writes."""
        self.blocked(partial(kernel.host, **scalars), *arrays)

    def use(self) -> None:
        """Let the thread that calls this work with the device."""

    def pinned_copy(self, host: Array) -> Array:
        """A host array in memory from which ``upload`` need not wait."""
        return host

    def upload(self, host: Array) -> Array:
        """A host array on the device, maybe still under way: it must not be changed any more."""
        return host

    def synchronize(self) -> None:
        """Wait until all that was asked of the device is done."""

    def mark(self) -> Mark:
        """A point in time: on a GPU, when the work put on the current stream so far is done."""
        return time.perf_counter()

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks, for which a GPU is waited for."""
        return float(end - start)

    def has_passed(self, mark: Mark) -> bool:  # noqa: ARG002
        """Whether the work before a mark is done."""
        return True

    def pin(self, host: Array) -> None:
        """Let host memory be the target of ``copy_out`` while the host does other things."""

    def unpin(self, host: Array) -> None:
        """Before pinned memory is given back."""

    def copy_out(self, array: Array, host: Array) -> None:
        """Begin to copy an array into pinned host memory; what is put on the stream later comes after."""
        np.copyto(host, array)

    def memory_bytes(self) -> int:
        """What this process holds of the device's memory; on a CPU its resident set, at its highest."""
        return host_memory_bytes()


class Cpu(Device):
    """NumPy."""

    def __init__(self, note: str = "asked for") -> None:
        self.note = note


def bits(x: Array) -> Array:
    """A view of the numbers as whole numbers: their product with a mask of bools keeps or clears any number,
    while that of an infinity or NaN with 0 would be NaN. It is no slower, and for 16 bits faster."""
    return x.view(f"int{8 * x.itemsize}")


def acc_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """In which to sum and to take exponentials: float32 for half precision, else ``dtype`` itself."""
    return max(np.dtype(dtype), FLOAT32, key=lambda known: known.itemsize)
