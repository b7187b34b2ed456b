"""A double of nvmath.bindings.cublasLt on addresses in host memory, which refuses what cuBLASLt
refuses.

Functions, their arguments, and the values and types of attributes are those of nvmath-python 1.0.0
(`cublasLt.pyi` and docstrings, read from its wheel); which types go together, and what an epilogue
reads and writes, is from NVIDIA's documentation of `cublasLtMatmul()` and `cublasLtEpilogue_t`.
"""

# ruff: noqa: PLR0917 - the library's names and arguments
from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np

from payload.device.base import Array
from tests.support.doubles.blas import matrix_at

_KINDS: dict[int, Any] = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
matmul_heuristic_result_dtype = np.dtype(
    [
        ("algo", [("data_", "<u8", (8,))]),
        ("workspace_size", "<u8"),
        ("state", "<i4"),
        ("waves_count", "<f4"),
        ("reserved", "<i4", (4,)),
    ]
)


class cuBLASLtError(Exception):  # noqa: N801 - cuBLASLt's name
    """A status other than success."""


class Epilogue(IntEnum):
    DEFAULT = 1
    BIAS = 4
    BGRADA = 256
    BGRADB = 512


class MatmulDescAttribute(IntEnum):
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8


class MatrixLayoutAttribute(IntEnum):
    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6


class MatmulPreferenceAttribute(IntEnum):
    MAX_WORKSPACE_BYTES = 1
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


_DTYPES: dict[str, Any] = {
    "TRANSA": np.int32,
    "TRANSB": np.int32,
    "EPILOGUE": np.uint32,
    "BIAS_POINTER": np.int64,
    "BATCH_COUNT": np.int32,
    "STRIDED_BATCH_OFFSET": np.int64,
    "MAX_WORKSPACE_BYTES": np.uint64,
    **{one.name: np.uint32 for one in MatmulPreferenceAttribute if one > 1},
}


@dataclass
class _Object:
    """A descriptor, layout or preference, with its attributes."""

    kind: str
    facts: tuple[int, ...] = ()
    attributes: dict[int, int] = field(default_factory=dict)

    def get(self, attribute: IntEnum, default: int = 0) -> int:
        return self.attributes.get(attribute, default)


unsupported: set[Epilogue] = set()
"""Epilogues for which there is no algorithm: tests add to it, since this depends on the GPU."""
_objects: dict[int, _Object] = {}
_ALGORITHM = 0x5EED


def _new(kind: str, *facts: int) -> int:
    _objects[number := len(_objects) + 1] = _Object(kind, facts)
    return number


def _dtype_of(attribute: IntEnum) -> Any:
    return _DTYPES[attribute.name]


get_matmul_desc_attribute_dtype = _dtype_of
get_matrix_layout_attribute_dtype = _dtype_of
get_matmul_preference_attribute_dtype = _dtype_of


def create() -> int:
    return _new("handle")


def matmul_desc_create(compute_type: int, scale_type: int) -> int:
    assert (compute_type, scale_type) == (68, 0)
    return _new("descriptor")


def matrix_layout_create(kind: int, rows: int, cols: int, ld: int) -> int:
    assert kind in _KINDS
    assert ld >= rows > 0 < cols
    return _new("layout", kind, rows, cols, ld)


def matmul_preference_create() -> int:
    return _new("preference")


def matmul_preference_destroy(pref: int) -> None:
    assert _objects[pref].kind == "preference"


def _set(owner: int, attr: IntEnum, buf: int, size_in_bytes: int, kind: str) -> None:
    dtype = np.dtype(_DTYPES[attr.name])
    assert size_in_bytes == dtype.itemsize
    assert _objects[owner].kind == kind
    memory: Any = (ctypes.c_byte * size_in_bytes).from_address(buf)
    value = np.frombuffer(memory, dtype)[0]
    _objects[owner].attributes[attr] = int(value)


def matmul_desc_set_attribute(
    matmul_desc: int, attr: IntEnum, buf: int, size_in_bytes: int
) -> None:
    _set(matmul_desc, MatmulDescAttribute(attr), buf, size_in_bytes, "descriptor")


def matrix_layout_set_attribute(
    mat_layout: int, attr: IntEnum, buf: int, size_in_bytes: int
) -> None:
    _set(mat_layout, MatrixLayoutAttribute(attr), buf, size_in_bytes, "layout")


def matmul_preference_set_attribute(pref: int, attr: IntEnum, buf: int, size_in_bytes: int) -> None:
    _set(pref, MatmulPreferenceAttribute(attr), buf, size_in_bytes, "preference")


def matmul_algo_get_heuristic(
    light_handle: int,
    operation_desc: int,
    adesc: int,
    bdesc: int,
    cdesc: int,
    ddesc: int,
    preference: int,
    requested_algo_count: int,
    heuristic_results_array: int,
    return_algo_count: int,
) -> None:
    _check(light_handle, operation_desc, adesc, bdesc, cdesc, ddesc)
    if _objects[operation_desc].get(MatmulDescAttribute.EPILOGUE) in unsupported:
        raise cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED")
    limits = _objects[preference]
    assert limits.kind == "preference"
    assert requested_algo_count == 1
    least = [limits.get(one, 256) for one in MatmulPreferenceAttribute if one > 1]
    size = matmul_heuristic_result_dtype.itemsize
    memory: Any = (ctypes.c_byte * size).from_address(heuristic_results_array)
    found = np.frombuffer(memory, matmul_heuristic_result_dtype)
    found["workspace_size"] = min(4096, limits.get(MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES))
    found["algo"]["data_"][0] = [_ALGORITHM, operation_desc, *least, 0, 0]
    ctypes.c_int.from_address(return_algo_count).value = 1


def matmul(
    light_handle: int,
    compute_desc: int,
    alpha: int,
    a: int,
    adesc: int,
    b: int,
    bdesc: int,
    beta: int,
    c: int,
    cdesc: int,
    d: int,
    ddesc: int,
    algo: int,
    workspace: int,
    workspace_size_in_bytes: int,
    stream: int,
) -> None:
    """D = alpha op(A) op(B) + beta C, by columns."""
    _check(light_handle, compute_desc, adesc, bdesc, cdesc, ddesc)
    memory: Any = (ctypes.c_uint64 * 8).from_address(algo)
    chosen = np.frombuffer(memory, np.uint64)
    assert list(chosen[:2]) == [_ALGORITHM, compute_desc], "an algorithm of another product"
    for address, least in zip((a, b, c, d), chosen[2:6], strict=True):
        assert address % int(least) == 0, "an address that is less aligned than promised"
    assert workspace
    assert workspace_size_in_bytes == 4096
    assert stream
    assert (c, cdesc) == (d, ddesc)
    assert _float(alpha) == 1
    assert _float(beta) in {0, 1}
    descriptor = _objects[compute_desc]
    count = _objects[ddesc].get(MatrixLayoutAttribute.BATCH_COUNT, 1)
    for index in range(count):
        left = _matrix(a, adesc, index).astype(np.float32)
        right = _matrix(b, bdesc, index).astype(np.float32)
        left = left.T if descriptor.get(MatmulDescAttribute.TRANSA) else left
        right = right.T if descriptor.get(MatmulDescAttribute.TRANSB) else right
        out = _matrix(d, ddesc, index)
        product = left @ right
        # With beta 0, what C holds does not matter, even if that is not a number.
        if _float(beta):
            product += out.astype(np.float32)
        epilogue = descriptor.get(MatmulDescAttribute.EPILOGUE, Epilogue.DEFAULT)
        if epilogue != Epilogue.DEFAULT:
            # Of D's type, and as long as D has rows: that is cuBLASLt's default.
            assert count == 1
            address = descriptor.get(MatmulDescAttribute.BIAS_POINTER)
            assert address % 16 == 0
            vector = matrix_at(address, _objects[ddesc].facts[0], len(out), 1, len(out))
            if epilogue == Epilogue.BIAS:
                product += vector.astype(np.float32)
            else:
                assert epilogue == Epilogue.BGRADA
                vector[...] = left.sum(axis=1, keepdims=True)
        out[...] = product


def _check(handle: int, desc: int, a: int, b: int, c: int, d: int) -> None:
    assert _objects[handle].kind == "handle"
    descriptor = _objects[desc]
    assert descriptor.kind == "descriptor"
    sides = []
    for layout, attribute in ((a, "TRANSA"), (b, "TRANSB")):
        _, rows, columns, _ = _objects[layout].facts
        turned = descriptor.get(MatmulDescAttribute[attribute])
        sides.append((columns, rows) if turned else (rows, columns))
    kinds = [_objects[one].facts[0] for one in (a, b, c, d)]
    # The table of types for CUBLAS_COMPUTE_32F.
    assert kinds[0] == kinds[1] in (2, 14)
    assert kinds[2] == kinds[3] in (0, kinds[0])
    assert sides[0][1] == sides[1][0]
    assert _objects[d].facts[1:3] == (sides[0][0], sides[1][1])
    counts = {_objects[one].get(MatrixLayoutAttribute.BATCH_COUNT, 1) for one in (a, b, c, d)}
    assert len(counts) == 1


def _matrix(address: int, layout: int, index: int) -> Array:
    kind, rows, columns, step = _objects[layout].facts
    jump = _objects[layout].get(MatrixLayoutAttribute.STRIDED_BATCH_OFFSET)
    size = np.dtype(_KINDS[kind]).itemsize
    return matrix_at(address + size * index * jump, kind, rows, columns, step)


def _float(address: int) -> float:
    return ctypes.c_float.from_address(address).value
