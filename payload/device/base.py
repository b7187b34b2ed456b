"""The device interface, implemented here with NumPy on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from payload.node.host import host_memory_bytes

if TYPE_CHECKING:
    from payload.device.capture import GraphRecorder
    from payload.device.fused import Fused

Array = NDArray[Any]
"""A NumPy or CuPy array; both have the same methods."""
GpuFacts = dict[str, str | int | None]
"""The keys ``index``, ``name`` and ``uuid``."""
Mark = Any
"""A point in time on a device. Only that device can interpret it."""
FLOAT32 = np.dtype("float32")

_BLOCK_BYTES = 1 << 19
"""Bytes of rows, with their results, that a CPU processes at once. Smaller blocks need more calls,
and larger blocks leave the second-level cache."""
_MATRIX_BYTES = 1 << 20
"""Bytes of a temporary matrix on a CPU, chosen so that it nearly fits in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A formula for each element of arrays, computed in a single pass through memory.

    ``host`` is the formula in NumPy. It takes the arrays named in ``reads``, then those in
    ``writes``, and scalars as keyword arguments. ``code`` is the formula in CUDA C for a single
    element, with the same names. The formula may also read the arrays in ``writes``.

    types: CuPy's type of each scalar and array by name, a dtype or a letter for any dtype. Default:
        T. indexed: whether ``code`` also reads ``column``, the element's index in the second axis.
    """

    name: str
    scalars: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    host: Callable[..., None]
    code: str
    types: Mapping[str, str] = field(default_factory=dict)
    indexed: bool = False

    def declare(self) -> tuple[str, str]:
        """Return CuPy's declarations of the inputs (scalars first, ``column`` last) and outputs."""
        column = ("column",) if self.indexed else ()
        types = {"column": "int32", **self.types}
        inputs, outputs = (
            ", ".join(f"{types.get(name, 'T')} {name}" for name in names)
            for names in (self.scalars + self.reads + column, self.writes)
        )
        return inputs, outputs


@dataclass(frozen=True, slots=True)
class Reduction(Kernel):
    """Numbers for each row of a matrix, computed in a single pass through the matrix.

    ``code`` is CUDA C that defines a type ``State``, which sums up a part of a row, and
    ``merge(State, State)``. The State of no elements is ``State()``. ``element`` is the State of
    one element, and ``result`` assigns to the arrays in ``writes`` from the State ``a`` of a row.
    """

    element: str = ""
    result: str = ""


def _add_rows(_: Array | None, index: Array, order: Array, rows: Array, total: Array) -> None:
    # Summing each index's rows is faster than np.add.at.
    first = np.ones(len(index), bool)
    first[1:] = index[1:] != index[:-1]
    starts = np.flatnonzero(first)
    if len(starts):
        rows = rows.astype(total.dtype, copy=False)[order]
        total[index[starts]] += np.add.reduceat(rows, starts, axis=0)


ADD_ROWS = Kernel(
    "add_rows",
    (),
    reads=("place", "index", "order", "rows"),
    writes=("total",),
    host=_add_rows,
    # The thread of an index's first place adds up all its rows, so their order is always the same.
    code="""
    if (place == 0 || index[place - 1] != index[place]) {
        S sum = 0;
        for (ptrdiff_t at = place; at < index.size() && index[at] == index[place]; at++) {
            const ptrdiff_t source[] = {order[at], column};
            sum += S(rows[source]);
        }
        const ptrdiff_t target[] = {index[place], column};
        total[target] += sum;
    }
    """,
    types={
        "place": "int64",
        "index": "raw int64",
        "order": "raw int64",
        "rows": "raw T",
        "total": "raw S",
    },
    indexed=True,
)
"""Adds rows to rows of ``total``. index: those of ``total``, sorted. order: those of ``rows``.
place: 0, 1, ... (N, 1)."""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An array that is being copied to the device. Only ``Device.receive`` may look at it."""

    array: Array
    # When the copy will have ended. None: it has.
    arrived: Mark = None


class Device:
    """A device that holds arrays and computes with them: the CPU, unless a subclass overrides
    methods.
    """

    xp: ModuleType = np
    """The module numpy or cupy."""
    gpu: GpuFacts | None = None
    """Index, name and UUID of the GPU; None on a CPU."""
    note: str = ""
    """Reason why this device was chosen."""

    def asarray(self, host: Array, dtype: DTypeLike | None = None) -> Array:
        """Copy a host array to the device, if necessary."""
        return np.asarray(host, dtype=dtype)

    def to_host(self, array: Array) -> Array:
        """Copy an array to the host. The next call with the same size and dtype may overwrite the
        copy.
        """
        return array

    def matmul(
        self, left: Array, right: Array, out: Array | None = None, dtype: DTypeLike | None = None
    ) -> Array:
        """Return left @ right, summed in float32 or wider.

        out: array for the result. Default: a new array. dtype: dtype of the result. Default: of the
            arrays.
        """
        result_dtype = (
            np.dtype(dtype) if dtype is not None else out.dtype if out is not None else left.dtype
        )
        # BLAS does not support smaller formats.
        if left.dtype.itemsize < FLOAT32.itemsize:
            left = left.astype(FLOAT32)
            right = right.astype(FLOAT32)
        if out is not None and out.dtype == left.dtype:
            return np.matmul(left, right, out=out)
        product: Array = (left @ right).astype(result_dtype, copy=False)
        if out is None:
            return product
        out[...] = product
        return out

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """Return x @ weight + bias: x (N, I), weight (I, O), bias (O,)."""
        y = self.matmul(x, weight)
        if bias is not None:
            y += bias
        return y

    def add_product(
        self, left: Array, right: Array, out: Array, *, add: bool, column_sums: bool = False
    ) -> Array | None:
        """Compute out += left @ right, or, unless ``add``, out[...] = left @ right.

        column_sums: whether to return the sums of the columns of ``right``, in the dtype of
            ``out``.
        """
        if add:
            out += self.matmul(left, right, dtype=out.dtype)
        else:
            self.matmul(left, right, out=out)
        return right.sum(axis=0, dtype=out.dtype) if column_sums else None

    def fused_for(self, x: Array) -> Fused | None:  # noqa: ARG002
        """Return the operations that compute a layer on arrays like x in one pass. None: compute it
        with ``xp``.
        """
        return None

    def recorder(self) -> GraphRecorder:
        """Return a new recorder of CUDA graphs, with memory of its own."""
        raise NotImplementedError("only a GPU records graphs")

    def blocked(self, function: Callable[..., None], *arrays: Array) -> None:
        """Call ``function`` with the same rows of all arrays, in blocks of rows that suit the
        device.

        ``function`` must treat each row independently. It may write results to the rows, or sum
        over blocks. An array with a single row, but not the first, is for all rows.
        """
        rows = len(arrays[0])
        row_bytes = sum(array.nbytes for array in arrays) // max(rows, 1)
        step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
        for start in range(0, rows, step):
            block = slice(start, start + step)
            function(*(array if len(array) == 1 else array[block] for array in arrays))

    def block_rows(self, row_bytes: int) -> int:
        """Return how many rows a temporary matrix may have at a time. row_bytes: bytes of a row."""
        return max(1, _MATRIX_BYTES // row_bytes)

    def apply(self, kernel: Kernel, scalars: Mapping[str, float], *arrays: Array) -> None:
        """Run a kernel on arrays that broadcast to the shape of the last: the arrays it reads, then
        the arrays it writes. All but those with a single row have as many rows as the first.
        """
        self.blocked(partial(kernel.host, **scalars), *arrays)

    def reduce(self, kernel: Reduction, *arrays: Array) -> None:
        """Run a reduction on a matrix (N, C), and the arrays (N,) that it writes."""
        self.blocked(kernel.host, *arrays)

    def add_rows(self, rows: Array, index: Array, total: Array) -> None:
        """Add rows (N, C) to the rows ``index`` (N,) of ``total``, whose sums are bit-identical in
        each run.
        """
        order = np.argsort(index, kind="stable")
        ADD_ROWS.host(None, index[order], order, rows, total)

    def use(self) -> None:
        """Select this device for the calling thread."""

    def pinned_copy(self, host: Array) -> Array:
        """Copy a host array to pinned memory. ``upload`` of pinned memory does not block."""
        return host

    def upload(self, host: Array) -> PendingUpload:
        """Start copying a host array to the device, beside the computation. Any thread may call
        this. Don't modify ``host`` until the copy is done.
        """
        return PendingUpload(host)

    def receive(self, upload: PendingUpload) -> Array:
        """Return an uploaded array. Later work on the current stream runs after the copy."""
        return upload.array

    def synchronize(self) -> None:
        """Wait until all queued work of the device is done."""

    def mark(self) -> Mark:
        """Return a point in time: now, or on a GPU, when the work queued on the current stream will
        end.
        """
        return time.perf_counter()

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two results of ``mark``. Waits until the GPU has reached
        both.
        """
        return float(end - start)

    def has_passed(self, mark: Mark) -> bool:  # noqa: ARG002
        """Return whether the point in time ``mark`` has passed: all work queued before it is
        done.
        """
        return True

    def pin(self, host: Array) -> None:
        """Pin host memory, so that ``copy_out`` to it does not block the host."""

    def unpin(self, host: Array) -> None:
        """Unpin host memory. Call this before the memory is freed."""

    def copy_out(self, array: Array, host: Array) -> None:
        """Start copying an array to pinned memory, ``host``. Later work on the stream runs after
        the copy.
        """
        np.copyto(host, array)

    def memory_bytes(self) -> int:
        """Return the bytes of GPU memory that this process holds; on a CPU, its peak resident set
        size.
        """
        return host_memory_bytes()


class CpuDevice(Device):
    def __init__(self, note: str = "requested") -> None:
        self.note = note


def pointer(array: Any) -> int:
    """Return the address of a GPU's array."""
    return int(array.data.ptr)


def bits(x: Array) -> Array:
    """View floating-point numbers as integers, so that multiplication by a 0/1 mask turns even NaN
    into 0.
    """
    return x.view(f"int{8 * x.itemsize}")


def acc_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the dtype for sums and exponentials: float32 for half precision, otherwise
    ``dtype``.
    """
    return max(np.dtype(dtype), FLOAT32, key=lambda candidate: candidate.itemsize)
