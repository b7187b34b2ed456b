"""CUDA C that CuPy makes of the payload's kernels, compiled by NVRTC for an H200 that is not here.

CuPy compiles a kernel when it is first called, which needs a GPU. So this program asks CuPy for the
source, by functions that CuPy does not document (version 14.2), and NVRTC for the machine code.
Standard output: a JSON object with the kernels that compiled, and the log of each that did not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from cupy._core import _kernel, _reduction, core
from cupy._core._carray import Indexer
from cupy._core._scalar import CScalar
from cupy.cuda import compiler

from payload.device.base import Kernel, Reduction
from tests.support.doubles.kernels import KERNELS, OF_OPTIMIZERS

_ARRAY, _INDEXER, _SCALAR = 1, 2, 3
_REALS: tuple[Any, ...] = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


def _types(kernel: Kernel, real: Any) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each scalar and array: of T ``real``, of S what it is summed in."""
    wide = np.result_type(real, np.float32) if real is not ml_dtypes.bfloat16 else np.float32
    letters = {"T": real, "S": wide}
    names = (*kernel.scalars, *kernel.reads, *kernel.writes)
    kinds = {name: kernel.types.get(name, "T").removeprefix("raw ") for name in names}
    return {name: np.dtype(letters.get(kind, kind)) for name, kind in kinds.items()}


def _source(kernel: Kernel, real: Any) -> str:
    dtypes = _types(kernel, real)
    inputs, outputs = kernel.declare()
    inputs = _kernel._get_param_info(inputs, True)
    outputs = _kernel._get_param_info(outputs, False)
    given = [dtypes.get(one.name, np.dtype("int32")) for one in inputs]
    given = [
        None if one.name in kernel.scalars else dtype
        for one, dtype in zip(inputs, given, strict=True)
    ]
    made = [dtypes[one.name] for one in outputs]
    *_, type_map = _kernel._decide_params_type(
        inputs,
        outputs,
        tuple(dtype and dtype.type for dtype in given),
        tuple(dtype.type for dtype in made),
    )
    arrays = [
        _kernel._ArgInfo(_SCALAR, CScalar, np.dtype(dtypes[one.name]), 0, True, True)
        if dtype is None
        else _kernel._ArgInfo(_ARRAY, cupy.ndarray, dtype, 2, False, True)
        for one, dtype in zip(inputs, given, strict=True)
    ]
    results = 1 if isinstance(kernel, Reduction) else 2
    arrays += [_kernel._ArgInfo(_ARRAY, cupy.ndarray, one, results, False, True) for one in made]
    name = f"payload_{kernel.name}"
    indexer = _kernel._ArgInfo(_INDEXER, Indexer, None, 2, True, True)
    if not isinstance(kernel, Reduction):
        params = (*inputs, *outputs, *_kernel._get_param_info("CIndexer _ind", False))
        return str(
            _kernel._get_elementwise_kernel_code(
                (*arrays, indexer), type_map, params, kernel.code, name, ""
            )
        )
    own = "CIndexer _in_ind, CIndexer _out_ind"
    params = (*inputs, *outputs, *_kernel._get_param_info(own, False))
    params += _kernel._get_param_info("int32 _block_stride", True)
    rest = (
        indexer,
        _kernel._ArgInfo(_INDEXER, Indexer, None, 1, True, True),
        _kernel._ArgInfo(_SCALAR, CScalar, np.dtype("int32"), 0, True, True),
    )
    index = (("IndexT", np.int32),)
    return str(
        _reduction._ReductionKernel_get_cached_function_code(
            len(inputs),
            len(outputs),
            params,
            (*arrays, *rest),
            _kernel._TypeMap((*_pairs(kernel, dtypes), *index)),
            name,
            512,
            "State",
            "State()",
            kernel.element,
            "merge(a, b)",
            kernel.result,
            kernel.code,
            (),
        )
    )


def _pairs(kernel: Kernel, dtypes: dict[str, np.dtype[Any]]) -> list[tuple[str, Any]]:
    letters = {kernel.types.get(name, "T"): dtype.type for name, dtype in dtypes.items()}
    return [(letter, kind) for letter, kind in letters.items() if letter in "TS"]


def main() -> None:
    compiled: list[str] = []
    refused: dict[str, str] = {}
    options = core.assemble_cupy_compiler_options(("-arch=sm_90",))
    headers = "".join(f"#include <{header}>\n" for header in core._cupy_header_list)
    for kernel in KERNELS.values():
        # Optimizers see 32 and 64 bits only.
        for real in _REALS[:2] if kernel.name in OF_OPTIMIZERS else _REALS:
            name = f"{kernel.name} {np.dtype(real).name}"
            source = headers + _source(kernel, real)
            try:
                compiler._NVRTCProgram(source, f"{kernel.name}.cu", method="cubin").compile(options)
                compiled.append(name)
            # Any refusal is reported, whatever CuPy raises.
            except Exception as exc:
                refused[name] = f"{type(exc).__name__} {exc}"
    sys.stdout.write(json.dumps({"compiled": compiled, "refused": refused}))


if __name__ == "__main__":
    main()
