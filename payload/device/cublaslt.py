"""Products of 16-bit matrices by cuBLASLt, through nvmath-python: summed in float32.

A product can add a bias to each row, or sum the columns of its right factor, in the same pass.
cuBLASLt reads memory column by column, so each product computes the transpose of the result:
rightᵀ @ leftᵀ. Its A is ``right``, and its B is ``left``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from payload.device.base import Array, pointer
from payload.device.cublas import KINDS, SUM_IN_FLOAT32, laid_out, suits

_WORKSPACE_BYTES = 32 << 20
"""NVIDIA recommends 32 MiB for Hopper."""
_LARGEST_ALIGNMENT = 256
"""Bytes. Kernels gain nothing from a larger alignment."""
_ZERO, _ONE = np.zeros(1, np.float32), np.ones(1, np.float32)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A factor or the result: number format, stored rows and columns, steps, and alignment."""

    kind: int
    rows: int
    columns: int
    step: int
    jump: int
    alignment: int


@dataclass(frozen=True, slots=True)
class _Plan:
    descriptor: int
    layouts: tuple[int, int, int]
    heuristic: Array
    workspace_bytes: int


class LtProducts:
    """Products, with a plan for each combination of shapes, layouts and epilogue.

    library: the module nvmath.bindings.cublasLt. xp: cupy.
    """

    def __init__(self, library: ModuleType, xp: ModuleType) -> None:
        self._library = library
        self._xp = xp
        self._handle = library.create()
        # None: cuBLASLt has no algorithm.
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}

    def fits(self, left: Array, right: Array) -> bool:
        """Return whether ``write`` supports these arrays, (..., M, K) and (..., K, N)."""
        return suits(left, right)

    def write(
        self,
        left: Array,
        right: Array,
        out: Array,
        *,
        add: bool = False,
        bias: Array | None = None,
        column_sums: Array | None = None,
    ) -> bool:
        """Compute out[...] = left @ right, or out += left @ right.

        Return False if cuBLASLt has no algorithm for that, which depends on the GPU; nothing is
        computed then.

        Args:
            out: in float32 or the factors' dtype, and in C order.
            bias: (N,) in the dtype of ``out``, added to each row.
            column_sums: (N,) in the dtype of ``out``: receives the sums of the columns of
                ``right``. Not together with ``bias``.
        """
        kinds = self._library.Epilogue
        left, left_op, left_step, left_jump = laid_out(left)
        right, right_op, right_step, right_jump = laid_out(right)
        rows, columns = out.shape[-2:]
        inner = left.shape[-1]
        count = math.prod(out.shape[:-2])
        epilogue = kinds.DEFAULT
        vector = bias if bias is not None else column_sums
        if vector is not None:
            epilogue = kinds.BIAS if bias is not None else kinds.BGRADA
        matrices = (
            self._matrices(right, (columns, inner), right_op, right_step, right_jump),
            self._matrices(left, (inner, rows), left_op, left_step, left_jump),
            self._matrices(out, (columns, rows), 0, columns, rows * columns),
        )
        key = (right_op, left_op, count, int(epilogue), *matrices)
        if key not in self._plans:
            self._plans[key] = self._plan(right_op, left_op, count, epilogue, matrices)
        plan = self._plans[key]
        if plan is None:
            return False
        if vector is not None:
            self._set_descriptor(plan.descriptor, "BIAS_POINTER", pointer(vector))
        factor_b, factor_a, result = (pointer(one) for one in (left, right, out))
        a, b, d = plan.layouts
        workspace = self._xp.empty(max(plan.workspace_bytes, 1), "uint8")
        self._library.matmul(
            self._handle,
            plan.descriptor,
            _ONE.ctypes.data,
            factor_a,
            a,
            factor_b,
            b,
            (_ONE if add else _ZERO).ctypes.data,
            result,
            d,
            result,
            d,
            plan.heuristic.ctypes.data,
            pointer(workspace),
            plan.workspace_bytes,
            self._xp.cuda.get_current_stream().ptr,
        )
        return True

    def _matrices(
        self, array: Array, shape: tuple[int, int], op: int, step: int, jump: int
    ) -> _Matrices:
        """Describe an array to cuBLASLt. shape: (rows, columns) in its order, before ``op``."""
        rows, columns = shape[::-1] if op else shape
        alignment = math.gcd(pointer(array), _LARGEST_ALIGNMENT) or _LARGEST_ALIGNMENT
        return _Matrices(KINDS[array.dtype.name], rows, columns, step, jump, alignment)

    def _plan(
        self,
        right_op: int,
        left_op: int,
        count: int,
        epilogue: int,
        matrices: tuple[_Matrices, _Matrices, _Matrices],
    ) -> _Plan | None:
        """Ask cuBLASLt for its best algorithm. None: it has none."""
        library = self._library
        descriptor = library.matmul_desc_create(SUM_IN_FLOAT32, KINDS["float32"])
        self._set_descriptor(descriptor, "TRANSA", right_op)
        self._set_descriptor(descriptor, "TRANSB", left_op)
        self._set_descriptor(descriptor, "EPILOGUE", epilogue)
        a, b, d = (self._layout(one, count) for one in matrices)
        preference = library.matmul_preference_create()
        limits = dict(zip("ABCD", (*matrices, matrices[-1]), strict=True))
        settings = {f"MIN_ALIGNMENT_{name}_BYTES": one.alignment for name, one in limits.items()}
        attributes = library.MatmulPreferenceAttribute
        for name, value in {"MAX_WORKSPACE_BYTES": _WORKSPACE_BYTES, **settings}.items():
            attribute = getattr(attributes, name)
            dtype = library.get_matmul_preference_attribute_dtype(attribute)
            _set(library.matmul_preference_set_attribute, preference, attribute, dtype, value)
        found = np.zeros(1, library.matmul_heuristic_result_dtype)
        returned = np.zeros(1, np.int32)
        try:
            library.matmul_algo_get_heuristic(
                self._handle,
                descriptor,
                a,
                b,
                d,
                d,
                preference,
                1,
                found.ctypes.data,
                returned.ctypes.data,
            )
        # Its status is NOT_SUPPORTED if there is no algorithm.
        except library.cuBLASLtError:
            return None
        finally:
            library.matmul_preference_destroy(preference)
        if not returned[0] or found["state"][0]:
            return None
        return _Plan(descriptor, (a, b, d), found, int(found["workspace_size"][0]))

    def _layout(self, matrices: _Matrices, count: int) -> int:
        library = self._library
        made = library.matrix_layout_create(
            matrices.kind, matrices.rows, matrices.columns, matrices.step
        )
        if count > 1:
            attributes = library.MatrixLayoutAttribute
            jump = {"BATCH_COUNT": count, "STRIDED_BATCH_OFFSET": matrices.jump}
            for name, value in jump.items():
                attribute = getattr(attributes, name)
                dtype = library.get_matrix_layout_attribute_dtype(attribute)
                _set(library.matrix_layout_set_attribute, made, attribute, dtype, value)
        return int(made)

    def _set_descriptor(self, descriptor: int, name: str, value: int) -> None:
        library = self._library
        attribute = getattr(library.MatmulDescAttribute, name)
        dtype = library.get_matmul_desc_attribute_dtype(attribute)
        _set(library.matmul_desc_set_attribute, descriptor, attribute, dtype, value)


def _set(setter: Callable[..., None], owner: int, attribute: int, dtype: Any, value: int) -> None:
    buffer = np.array([value], dtype)
    setter(owner, attribute, buffer.ctypes.data, buffer.nbytes)
