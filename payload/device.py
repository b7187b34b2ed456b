"""The one place that knows NumPy from CuPy: everything else computes with ``device.xp``.

MPI is never given device memory, since that crashes where MPI was built without CUDA: arrays of a GPU are
staged through pinned host memory, which the GPU copies at full speed.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from payload.cublas import Products
from payload.errors import UsageError
from payload.host import host_memory_bytes

Array = NDArray[Any]
"""NumPy's array or CuPy's, which has the same methods."""

GpuFacts = dict[str, str | int | None]
"""index, name and uuid"""

Mark = Any
"""A point in time, which only its device understands."""

_FLOAT32 = np.dtype("float32")

_BLOCK_BYTES = 1 << 18
"""Rows that are worked on at once on a CPU: they and what comes of them stay in the second-level cache."""

_MATRIX_BYTES = 1 << 20
"""Of a temporary matrix on a CPU: it stays in the second-level cache, or nearly."""

_GPU_MATRIX_BYTES = 1 << 28
"""Likewise on a GPU, where only memory bounds it: large enough for products at full speed."""


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
        if left.dtype.itemsize < _FLOAT32.itemsize:  # BLAS knows none of those
            left, right = left.astype(_FLOAT32), right.astype(_FLOAT32)
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


class Gpu(Device):
    """CuPy on one of the node's GPUs."""

    def __init__(self, cupy: ModuleType, index: int) -> None:
        self.xp = cupy
        self.note = "CuPy found it"
        self._index = index
        self.use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.gpu = {
            "index": index,
            "name": properties["name"].decode(),
            "uuid": _uuid(properties.get("uuid", b"")),
        }
        self._empty_pinned = importlib.import_module("cupyx").empty_pinned
        libraries = importlib.import_module("cupy_backends.cuda.libs")  # finds and loads what it is asked for
        self._products = Products(libraries.cublas, cupy.cuda.device.get_cublas_handle)
        self._staging: dict[tuple[int, str], Array] = {}
        self._on_their_way: list[tuple[Any, Array]] = []
        self._kernels: dict[str, Callable[..., Any]] = {}

    def asarray(self, host: Array, dtype: DTypeLike | None = None) -> Array:
        array: Array = self.xp.asarray(host, dtype=dtype)
        return array

    def to_host(self, array: Array) -> Array:
        key = (array.size, array.dtype.str)
        if key not in self._staging:
            self._staging[key] = self._empty_pinned(array.size, array.dtype)
        host = self._staging[key].reshape(array.shape)
        device_array: Any = array
        device_array.get(out=host)
        return host

    def matmul(
        self, left: Array, right: Array, out: Array | None = None, dtype: DTypeLike | None = None
    ) -> Array:
        wanted = np.dtype(dtype) if dtype is not None else out.dtype if out is not None else left.dtype
        if wanted.itemsize > left.dtype.itemsize:
            # CuPy's product of 16 bits is rounded to 16, and fp16 may overflow, before it could be widened.
            if wanted == _FLOAT32 and self._products.fits(left, right):
                return self._float32_product(left, right, out)
            left, right = left.astype(wanted), right.astype(wanted)
        if out is not None and out.dtype == left.dtype and out.flags.c_contiguous:
            product: Array = self.xp.matmul(left, right, out=out)
            return product
        product = self.xp.matmul(left, right).astype(wanted, copy=False)
        if out is None:
            return product
        out[...] = product
        return out

    def _float32_product(self, left: Array, right: Array, out: Array | None) -> Array:
        direct = out is not None and out.flags.c_contiguous
        shape = (*left.shape[:-1], right.shape[-1])
        product: Array = out if direct and out is not None else self.xp.empty(shape, _FLOAT32)
        self._products.write(left, right, product)
        if out is None or direct:
            return product
        out[...] = product
        return out

    def blocked(self, function: Callable[..., None], *arrays: Array) -> None:
        function(*arrays)

    def block_rows(self, row_bytes: int) -> int:
        return max(1, _GPU_MATRIX_BYTES // row_bytes)

    def apply(self, kernel: Kernel, scalars: Mapping[str, float], *arrays: Array) -> None:
        if kernel.name not in self._kernels:
            inputs, outputs = (
                ", ".join(f"T {name}" for name in names)
                for names in (kernel.scalars + kernel.reads, kernel.writes)
            )
            compiled = self.xp.ElementwiseKernel(inputs, outputs, kernel.code, f"payload_{kernel.name}")
            self._kernels[kernel.name] = compiled
        self._kernels[kernel.name](*(scalars[name] for name in kernel.scalars), *arrays)

    def use(self) -> None:
        self.xp.cuda.Device(self._index).use()

    def pinned_copy(self, host: Array) -> Array:
        pinned: Array = self._empty_pinned(host.shape, host.dtype)
        pinned[...] = host
        return pinned

    def upload(self, host: Array) -> Array:
        host = np.ascontiguousarray(host)
        array: Array = self.xp.empty(host.shape, host.dtype)
        device_array: Any = array
        device_array.set(host, stream=self.xp.cuda.get_current_stream())
        arrived = self.xp.cuda.Event(disable_timing=True)
        arrived.record()
        # Pinned memory that nobody refers to is given out again at once.
        self._on_their_way = [(event, kept) for event, kept in self._on_their_way if not event.done]
        self._on_their_way.append((arrived, host))
        return array

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def mark(self) -> Mark:
        event = self.xp.cuda.Event()
        event.record()
        return event

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(start, end)) / 1e3

    def has_passed(self, mark: Mark) -> bool:
        return bool(mark.done)

    def pin(self, host: Array) -> None:
        self.xp.cuda.runtime.hostRegister(host.ctypes.data, host.nbytes, 0)

    def unpin(self, host: Array) -> None:
        self.synchronize()  # a copy may be under way
        self.xp.cuda.runtime.hostUnregister(host.ctypes.data)

    def copy_out(self, array: Array, host: Array) -> None:
        if isinstance(array, np.ndarray):  # such as an optimizer's state that was offloaded
            np.copyto(host, array)
        else:
            array.get(out=host, blocking=False)

    def memory_bytes(self) -> int:
        return int(self.xp.get_default_memory_pool().total_bytes())


def bits(x: Array) -> Array:
    """A view of the numbers as whole numbers: their product with a mask of bools keeps or clears any number,
    while that of an infinity or NaN with 0 would be NaN. It is no slower, and for 16 bits faster."""
    view: Array = x.view(f"int{8 * x.itemsize}")
    return view


def acc_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """In which to sum and to take exponentials: float32 for half precision, else ``dtype`` itself."""
    return max(np.dtype(dtype), _FLOAT32, key=lambda known: known.itemsize)


def choose(wanted: str, local_rank: int) -> Device:
    """The device for the ``local_rank``-th rank of this node; ranks share GPUs in turn if there are fewer.

    Args:
        wanted: ``cpu``, ``gpu``, or ``auto`` for a GPU where CuPy finds one.

    Raises:
        UsageError: ``gpu`` was asked for and cannot be had.
    """
    if wanted == "cpu":
        return Cpu()
    _take_own_part(local_rank)
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as exc:
        return _without_gpu(wanted, f"no CuPy: {exc}", exc)
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        return _without_gpu(wanted, f"no GPU: {exc}", exc)
    if not count:
        return _without_gpu(wanted, "CUDA counts no GPU")
    try:
        return Gpu(cupy, local_rank % count)
    except ImportError as exc:
        return _without_gpu(wanted, f"CuPy finds no cuBLAS: {exc}", exc)


def _take_own_part(local_rank: int) -> None:
    """Of several parts of GPUs (MIG) CUDA shows a process the first alone: each rank names its own to it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(visible) > 1 and all(name.startswith("MIG-") for name in visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)]


def _without_gpu(wanted: str, why: str, cause: Exception | None = None) -> Cpu:
    if wanted == "gpu":
        ask = "see that nvidia-smi shows one there, and that the job asks for it (submit --gpus 1)"
        raise UsageError(f"--device gpu: {why}; {ask}", code="no-gpu") from cause
    # Where there is no GPU, nobody misses it.
    return Cpu(f"a GPU is here but not used: {why}" if Path("/dev/nvidia0").exists() else "")


def _uuid(raw: bytes) -> str | None:
    """In the form nvidia-smi and Slurm print; None where its 16 bytes were cut at a zero."""
    if len(raw) < 16:  # noqa: PLR2004
        return None
    digits = raw[:16].hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
