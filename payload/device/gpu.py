"""CuPy on a GPU: pinned memory, 16-bit products summed in 32 bits, and streams."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from payload.device.base import (
    ADD_ROWS,
    FLOAT32,
    Array,
    Device,
    Kernel,
    Mark,
    PendingUpload,
    Reduction,
)
from payload.device.capture import GraphRecorder
from payload.device.cublas import MatrixProducts
from payload.device.cublaslt import LtProducts
from payload.device.fused import Fused
from payload.device.graphs import CudnnGraphs, aligned

_GPU_MATRIX_BYTES = 1 << 28
"""Bytes of a temporary matrix on a GPU. Large enough for products at full speed."""


class UploadStream:
    """Copies of host arrays to a GPU, on a stream of their own. xp: cupy."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._lock = threading.Lock()
        self._under_way: list[tuple[PendingUpload, Array]] = []

    def start(self, host: Array) -> PendingUpload:
        host = np.ascontiguousarray(host)
        computing = self._xp.cuda.get_current_stream()
        # The pool gives memory of the computing stream, whose earlier work may still use it.
        array: Any = self._xp.empty(host.shape, host.dtype)
        self._stream.wait_event(computing.record())
        array.set(host, stream=self._stream)
        upload = PendingUpload(array, self._stream.record())
        with self._lock:
            # Memory without a reference is reused at once, on the host and, if nobody waits for
            # the upload, on the device. So keep references until the copy is done.
            self._under_way = [one for one in self._under_way if not one[0].arrived.done]
            self._under_way.append((upload, host))
        return upload


class GpuDevice(Device):
    def __init__(self, cupy: ModuleType, index: int) -> None:
        # This import loads cuBLAS.
        from cupy_backends.cuda.libs import cublas
        from cupyx import empty_pinned

        self.xp = cupy
        self.note = "CuPy detected it"
        self._index = index
        self.use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.gpu = {
            "index": index,
            "name": properties["name"].decode(),
            "uuid": _uuid(properties.get("uuid", b"")),
        }
        self._empty_pinned = empty_pinned
        self._products: MatrixProducts | LtProducts = MatrixProducts(
            cublas, cupy.cuda.device.get_cublas_handle
        )
        self._fused: Fused | None = None
        self._recorders = weakref.WeakSet[GraphRecorder]()
        self._staging: dict[tuple[int, str], Array] = {}
        self._uploads = UploadStream(cupy)
        self._kernels: dict[str, Callable[..., Any]] = {}

    def fuse(self, cudnn: ModuleType, cublaslt: ModuleType, *, deterministic: bool) -> None:
        """Compute 16-bit layers by cuDNN and cuBLASLt from now on.

        cudnn: the module of nvidia-cudnn-frontend. cublaslt: nvmath.bindings.cublasLt.
        deterministic: whether to use only algorithms whose results are bit-identical in each run.
        """
        graphs = CudnnGraphs(cudnn, self.xp, deterministic=deterministic)
        products = LtProducts(cublaslt, self.xp)
        self._fused = Fused(graphs, products, self.xp)
        self._products = products

    def fused_for(self, x: Array) -> Fused | None:
        return self._fused if x.dtype.itemsize == 2 and x.size else None  # noqa: PLR2004

    def recorder(self) -> GraphRecorder:
        recorder = GraphRecorder(self.xp)
        self._recorders.add(recorder)
        return recorder

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        fused = self.fused_for(x)
        if not fused or bias is None or not fused.products.fits(x, weight):
            return super().linear(x, weight, bias)
        y: Array = self.xp.empty((len(x), weight.shape[1]), x.dtype)
        if fused.products.write(x, weight, y, bias=aligned(bias)):
            return y
        return super().linear(x, weight, bias)

    def add_product(
        self, left: Array, right: Array, out: Array, *, add: bool, column_sums: bool = False
    ) -> Array | None:
        fused = self.fused_for(left)
        if not fused or not fused.products.fits(left, right):
            return super().add_product(left, right, out, add=add, column_sums=column_sums)
        sums = self.xp.empty(right.shape[1], out.dtype) if column_sums else None
        if fused.products.write(left, right, out, add=add, column_sums=sums):
            return sums
        return super().add_product(left, right, out, add=add, column_sums=column_sums)

    def asarray(self, host: Array, dtype: DTypeLike | None = None) -> Array:
        return self.xp.asarray(host, dtype=dtype)

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
        result_dtype = (
            np.dtype(dtype) if dtype is not None else out.dtype if out is not None else left.dtype
        )
        if self._products.fits(left, right) and result_dtype in {FLOAT32, left.dtype}:
            direct = self._cublas_product(left, right, out, result_dtype)
            if direct is not None:
                return direct
        if left.dtype.itemsize < result_dtype.itemsize or left.dtype.itemsize == 2:  # noqa: PLR2004
            # CuPy has no products of batches in bfloat16, and rounds 16-bit products before they
            # are widened.
            wide = np.promote_types(result_dtype, FLOAT32)
            left = left.astype(wide)
            right = right.astype(wide)
        if out is not None and out.dtype == left.dtype and out.flags.c_contiguous:
            return self.xp.matmul(left, right, out=out)
        product = self.xp.matmul(left, right).astype(result_dtype, copy=False)
        if out is None:
            return product
        out[...] = product
        return out

    def _cublas_product(
        self, left: Array, right: Array, out: Array | None, dtype: DTypeLike
    ) -> Array | None:
        is_direct = out is not None and out.flags.c_contiguous and out.dtype == dtype
        shape = (*left.shape[:-1], right.shape[-1])
        product: Array = out if is_direct and out is not None else self.xp.empty(shape, dtype)
        if not self._products.write(left, right, product):
            return None
        if out is None or is_direct:
            return product
        out[...] = product
        return out

    def blocked(self, function: Callable[..., None], *arrays: Array) -> None:
        function(*arrays)

    def block_rows(self, row_bytes: int) -> int:
        return max(1, _GPU_MATRIX_BYTES // row_bytes)

    def apply(self, kernel: Kernel, scalars: Mapping[str, float], *arrays: Array) -> None:
        if kernel.name not in self._kernels:
            self._kernels[kernel.name] = self.xp.ElementwiseKernel(
                *kernel.declare(), kernel.code, f"payload_{kernel.name}"
            )
        reads, writes = arrays[: len(kernel.reads)], arrays[len(kernel.reads) :]
        numbers = (scalars[name] for name in kernel.scalars)
        columns = self._columns(kernel, arrays[-1])
        self._kernels[kernel.name](*numbers, *reads, *columns, *writes)

    def reduce(self, kernel: Reduction, *arrays: Array) -> None:
        if kernel.name not in self._kernels:
            self._kernels[kernel.name] = self.xp.ReductionKernel(
                *kernel.declare(),
                kernel.element,
                "merge(a, b)",
                kernel.result,
                "State()",
                f"payload_{kernel.name}",
                reduce_type="State",
                preamble=kernel.code,
            )
        matrix, *results = arrays
        self._kernels[kernel.name](matrix, *self._columns(kernel, matrix), *results, axis=1)

    def _columns(self, kernel: Kernel, matrix: Array) -> list[Array]:
        return [self.xp.arange(matrix.shape[1], dtype="int32")[None]] if kernel.indexed else []

    def add_rows(self, rows: Array, index: Array, total: Array) -> None:
        # No shape depends on the values, so the host need not wait for them.
        order = self.xp.argsort(index, kind="stable")
        places = self.xp.arange(len(index))[:, None]
        self.apply(ADD_ROWS, {}, places, index[order], order, rows, total)

    def use(self) -> None:
        self.xp.cuda.Device(self._index).use()

    def pinned_copy(self, host: Array) -> Array:
        pinned: Array = self._empty_pinned(host.shape, host.dtype)
        pinned[...] = host
        return pinned

    def upload(self, host: Array) -> PendingUpload:
        return self._uploads.start(host)

    def receive(self, upload: PendingUpload) -> Array:
        self.xp.cuda.get_current_stream().wait_event(upload.arrived)
        return upload.array

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
        # A copy may be in progress.
        self.synchronize()
        self.xp.cuda.runtime.hostUnregister(host.ctypes.data)

    def copy_out(self, array: Array, host: Array) -> None:
        # Offloaded optimizer state, for example, is on the host already.
        if isinstance(array, np.ndarray):
            np.copyto(host, array)
        else:
            array.get(out=host, blocking=False)

    def memory_bytes(self) -> int:
        of_graphs = sum(recorder.nbytes for recorder in self._recorders)
        return int(self.xp.get_default_memory_pool().total_bytes()) + of_graphs


def _uuid(raw: bytes) -> str | None:
    """Return a GPU's UUID as nvidia-smi and Slurm print it, or None if ``raw`` was cut off at a
    zero byte.
    """
    if len(raw) < 16:  # noqa: PLR2004
        return None
    digits = raw[:16].hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
