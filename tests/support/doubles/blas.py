"""Functions of cuBLAS on addresses in host memory, for the double of CuPy."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from payload.device.base import Array

_KINDS: dict[int, Any] = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}


class PlayedCublas:
    """The two functions of cupy_backends.cuda.libs.cublas that the payload calls."""

    handle = 77

    def gemmEx(  # noqa: N802, PLR0917
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_kind: int,
        lda: int, b: int, b_kind: int, ldb: int, beta: int, c: int, c_kind: int, ldc: int, compute: int,
        algorithm: int,
    ) -> None:  # fmt: skip
        """C = op(A) op(B)."""
        matrices = (a, a_kind, lda, 0, b, b_kind, ldb, 0, beta, c, c_kind, ldc, 0)
        self.gemmStridedBatchedEx(
            handle, transa, transb, m, n, k, alpha, *matrices, 1, compute, algorithm
        )

    def gemmStridedBatchedEx(  # noqa: N802, PLR0917
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_kind: int,
        lda: int, a_jump: int, b: int, b_kind: int, ldb: int, b_jump: int, beta: int, c: int, c_kind: int,
        ldc: int, c_jump: int, count: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        """C = op(A) op(B), of columns that follow each other in memory."""
        assert (handle, compute, algorithm) == (self.handle, 68, -1)
        # cuBLAS's table of types for CUBLAS_COMPUTE_32F (cublasGemmEx).
        assert a_kind == b_kind
        assert c_kind in {0, a_kind}
        assert (matrix_at(alpha, 0, 1, 1, 1)[0, 0], matrix_at(beta, 0, 1, 1, 1)[0, 0]) == (1, 0)
        size = np.dtype(_KINDS[c_kind]).itemsize
        for index in range(count):
            left = _operand(a + 2 * index * a_jump, a_kind, (m, k), lda, transposed=bool(transa))
            right = _operand(b + 2 * index * b_jump, b_kind, (k, n), ldb, transposed=bool(transb))
            matrix_at(c + size * index * c_jump, c_kind, m, n, ldc)[...] = left @ right


def _operand(
    pointer: int, kind: int, shape: tuple[int, int], step: int, *, transposed: bool
) -> Array:
    matrix = matrix_at(pointer, kind, *(shape[::-1] if transposed else shape), step)
    wide: Array = (matrix.T if transposed else matrix).astype(np.float32)
    return wide


def matrix_at(pointer: int, kind: int, rows: int, columns: int, step: int) -> Array:
    """A matrix whose columns are ``step`` elements apart."""
    assert step >= max(1, rows)
    dtype = np.dtype(_KINDS[kind])
    numbers = (columns - 1) * step + rows
    memory = (ctypes.c_byte * (numbers * dtype.itemsize)).from_address(pointer)
    found: Array = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(
        found, (rows, columns), (dtype.itemsize, step * dtype.itemsize)
    )
