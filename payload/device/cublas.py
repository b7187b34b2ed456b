"""Products of 16-bit matrices which cuBLAS sums and gives as float32; CuPy's ``matmul`` gives 16 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_KINDS = {"float16": 2, "bfloat16": 14, "float32": 0}
"""cudaDataType_t"""
_SUM_IN_FLOAT32 = 68
"""CUBLAS_COMPUTE_32F"""
_DEFAULT = -1
"""CUBLAS_GEMM_DEFAULT"""
_PLAIN, _TRANSPOSED = 0, 1
"""CUBLAS_OP_N and CUBLAS_OP_T"""

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


class Products:
    """``library`` is cupy_backends.cuda.libs.cublas, ``handle`` gives the calling thread's."""

    def __init__(self, library: Any, handle: Callable[[], int]) -> None:
        self._library, self._handle = library, handle

    def fits(self, left: Array, right: Array) -> bool:
        """Whether these can be multiplied here: (..., M, K) by (..., K, N), of as many matrices each."""
        return (
            left.dtype == right.dtype
            and left.dtype.itemsize == 2  # noqa: PLR2004 - bytes
            and left.dtype.name in _KINDS
            and left.ndim == right.ndim >= 2  # noqa: PLR2004
            and left.shape[:-2] == right.shape[:-2]
            and left.shape[-1] == right.shape[-2]
            and left.size > 0
            and right.size > 0
        )

    def write(self, left: Array, right: Array, out: Array) -> None:
        """out[...] = left @ right, for float32 in C order."""
        rows, inner, columns = *left.shape[-2:], right.shape[-1]
        left, left_op, left_step, left_jump = _laid_out(left)
        right, right_op, right_step, right_jump = _laid_out(right)
        kind = _KINDS[left.dtype.name]
        # Column after column, as cuBLAS reads memory, the result's transpose: rightᵀ @ leftᵀ.
        head = (self._handle(), right_op, left_op, columns, rows, inner, _ONE.ctypes.data)
        tail = (_SUM_IN_FLOAT32, _DEFAULT)
        to = (_ZERO.ctypes.data, _pointer(out), _KINDS["float32"], columns)
        if out.ndim == 2:  # noqa: PLR2004
            matrices = (_pointer(right), kind, right_step, _pointer(left), kind, left_step)
            self._library.gemmEx(*head, *matrices, *to, *tail)
            return
        batches = (_pointer(right), kind, right_step, right_jump, _pointer(left), kind, left_step, left_jump)
        count = math.prod(out.shape[:-2])
        self._library.gemmStridedBatchedEx(*head, *batches, *to, rows * columns, count, *tail)


def _laid_out(array: Array) -> tuple[Array, int, int, int]:
    """Itself or a copy; whether transposed; how many elements lie from one row to the next (of the transpose,
    if so), and from one matrix to the next."""
    layout = _layout(array)
    if layout is None:
        array = array.copy(order="C")
        layout = _layout(array)
    assert layout is not None  # noqa: S101 - what is in C order has one
    return (array, *layout)


def _layout(array: Array) -> tuple[int, int, int] | None:
    size = array.dtype.itemsize
    rows, columns = array.shape[-2:]
    steps = [step // size for step in array.strides]
    *jumps, down, right = steps
    if right == 1 and down >= columns:
        op, step = _PLAIN, down
    elif down == 1 and right >= rows:
        op, step = _TRANSPOSED, right
    else:
        return None
    outer = [(count, jump) for count, jump in zip(array.shape[:-2], jumps, strict=True) if count > 1]
    for (_, jump), (count, inner) in itertools.pairwise(outer):
        if jump != count * inner:
            return None
    return op, step, outer[-1][1] if outer else 0


def _pointer(array: Any) -> int:
    return int(array.data.ptr)
