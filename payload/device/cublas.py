"""Products of 16-bit matrices by cuBLAS, summed in float32, with 16-bit or float32 results.

CuPy's ``matmul`` has no float32 results of 16-bit matrices, and no products of batches in bfloat16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from payload.device.base import Array, pointer

# cudaDataType_t, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT, CUBLAS_OP_N and CUBLAS_OP_T.
KINDS = {"float16": 2, "bfloat16": 14, "float32": 0}
SUM_IN_FLOAT32 = 68
_DEFAULT = -1
_PLAIN = 0
_TRANSPOSED = 1
_ONE = np.ones(1, np.float32)
_ZERO = np.zeros(1, np.float32)


class MatrixProducts:
    """Matrix products by cuBLAS.

    library: the module cupy_backends.cuda.libs.cublas. handle: returns the calling thread's cuBLAS
        handle.
    """

    def __init__(self, library: Any, handle: Callable[[], int]) -> None:
        self._library = library
        self._handle = handle

    def fits(self, left: Array, right: Array) -> bool:
        """Return whether ``write`` supports these arrays, (..., M, K) and (..., K, N)."""
        return suits(left, right)

    def write(self, left: Array, right: Array, out: Array) -> bool:
        """Compute out[...] = left @ right, with ``out`` in float32 or the factors' dtype, and in C
        order. Return True.
        """
        rows, inner = left.shape[-2:]
        columns = right.shape[-1]
        left, left_op, left_step, left_jump = laid_out(left)
        right, right_op, right_step, right_jump = laid_out(right)
        kind = KINDS[left.dtype.name]
        # cuBLAS reads memory column by column, so compute the transpose of the result: rightᵀ @
        # leftᵀ.
        head = (self._handle(), right_op, left_op, columns, rows, inner, _ONE.ctypes.data)
        tail = (SUM_IN_FLOAT32, _DEFAULT)
        to = (_ZERO.ctypes.data, pointer(out), KINDS[out.dtype.name], columns)
        if out.ndim == 2:  # noqa: PLR2004
            matrices = (pointer(right), kind, right_step, pointer(left), kind, left_step)
            self._library.gemmEx(*head, *matrices, *to, *tail)
            return True
        batches = (
            pointer(right),
            kind,
            right_step,
            right_jump,
            pointer(left),
            kind,
            left_step,
            left_jump,
        )
        count = math.prod(out.shape[:-2])
        self._library.gemmStridedBatchedEx(*head, *batches, *to, rows * columns, count, *tail)
        return True


def suits(left: Array, right: Array) -> bool:
    """Return whether these are 16-bit matrices, or batches of them, that fit together."""
    return (
        left.dtype == right.dtype
        and left.dtype.itemsize == 2  # noqa: PLR2004 - bytes
        and left.dtype.name in KINDS
        and left.ndim == right.ndim >= 2  # noqa: PLR2004
        and left.shape[:-2] == right.shape[:-2]
        and left.shape[-1] == right.shape[-2]
        and left.size > 0
        and right.size > 0
    )


def laid_out(array: Array) -> tuple[Array, int, int, int]:
    """Return matrices in a layout that cuBLAS reads: themselves or a copy, with the operation (0:
    plain, 1: transposed), and the steps of rows and of matrices.
    """
    layout = _layout(array)
    if layout is None:
        array = array.copy(order="C")
        layout = _layout(array)
    assert layout is not None  # noqa: S101 - C order has a layout
    return (array, *layout)


def _layout(array: Array) -> tuple[int, int, int] | None:
    # None if cuBLAS can't read the array, otherwise the operation, and the steps of rows and of
    # matrices.
    size = array.dtype.itemsize
    rows, columns = array.shape[-2:]
    steps = [step // size for step in array.strides]
    *jumps, down, right = steps
    if right == 1 and down >= columns:
        op = _PLAIN
        step = down
    elif down == 1 and right >= rows:
        op = _TRANSPOSED
        step = right
    else:
        return None
    outer = [
        (count, jump) for count, jump in zip(array.shape[:-2], jumps, strict=True) if count > 1
    ]
    for (_, jump), (count, inner) in itertools.pairwise(outer):
        if jump != count * inner:
            return None
    return op, step, outer[-1][1] if outer else 0
