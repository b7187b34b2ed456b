"""What kernels compute on a GPU: compiled for the CPU, the same as their NumPy; and NVRTC compiles
what CuPy makes of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.device.base import ADD_ROWS, Array, Kernel, Reduction
from tests.support.doubles.kernels import KERNELS

_ROOT = Path(__file__).parents[3]
_N = 1000
_ROWS, _COLUMNS = 12, 700
_CTYPES = {"int64": "long long", "int32": "int", "uint32": "unsigned", "uint8": "unsigned char"}
_DTYPES = {"float": np.float32, "double": np.float64}
_ARRAY = """
#include <cmath>
#include <cstddef>
#define __device__
using namespace std;
template <class E> struct Raw {
    E *data; ptrdiff_t rows, columns;
    ptrdiff_t size() const { return rows * columns; }
    E &operator[](ptrdiff_t i) const { return data[i]; }
    E &operator[](const ptrdiff_t (&i)[2]) const { return data[i[0] * columns + i[1]]; }
};
"""


def _kind(kernel: Kernel, name: str) -> str:
    """Return the C++ type of a scalar or an array's elements, where T and S are typedefs."""
    kind = kernel.types.get(name, "T").removeprefix("raw ")
    return _CTYPES.get(kind, kind)


def _function(kernel: Kernel, real: str) -> str:
    """C++ that runs a kernel's CUDA C as CuPy does. Each array comes with its rows and columns, and
    is repeated along those of length 1.
    """
    body = _reduction(kernel) if isinstance(kernel, Reduction) else _elementwise(kernel)
    names = (*kernel.reads, *kernel.writes)
    given = [f"const {_kind(kernel, name)} *in_{name}" for name in kernel.scalars]
    given += [
        f"{_kind(kernel, n)} *all_{n}, long long {n}_rows, long long {n}_columns" for n in names
    ]
    scalars = [f"const {_kind(kernel, name)} {name} = *in_{name};" for name in kernel.scalars]
    preamble = kernel.code if isinstance(kernel, Reduction) else ""
    return f"""
    namespace {kernel.name}_{real} {{
    typedef {real} T;
    typedef {real} S;
    {preamble}
    extern "C" void {kernel.name}_{real}({", ".join(given)}) {{ {" ".join(scalars)} {body} }}
    }}
    """


def _elementwise(kernel: Kernel) -> str:
    names = (*kernel.reads, *kernel.writes)
    raw = [name for name in names if kernel.types.get(name, "").startswith("raw ")]
    outside = [
        f"const Raw<{_kind(kernel, name)}> {name} = {{all_{name}, {name}_rows, {name}_columns}};"
        for name in raw
    ]
    inside = [
        f"{'const ' if name in kernel.reads else ''}{_kind(kernel, name)} &{name} = all_{name}"
        f"[({name}_rows == 1 ? 0 : row) * {name}_columns + ({name}_columns == 1 ? 0 : column)];"
        for name in names
        if name not in raw
    ]
    last = names[-1]
    rows = f"{names[0]}_rows" if raw else f"{last}_rows"
    return f"""
    {" ".join(outside)}
    for (int row = 0; row < {rows}; row++)
        for (int column = 0; column < {last}_columns; column++) {{ {" ".join(inside)} {kernel.code} }}
    """


def _reduction(kernel: Reduction) -> str:
    """A block of 512 threads for each row, as in CuPy's `_create_reduction_function_code`."""
    (matrix,) = kernel.reads
    results = " ".join(f"S &{name} = all_{name}[row];" for name in kernel.writes)
    return f"""
    for (int row = 0; row < {matrix}_rows; row++) {{
        static State states[512];
        for (int thread = 0; thread < 512; thread++) {{
            states[thread] = State();
            for (int column = thread; column < {matrix}_columns; column += 512) {{
                const T &{matrix} = all_{matrix}[row * {matrix}_columns + column];
                states[thread] = merge(states[thread], {kernel.element});
            }}
        }}
        for (int half = 256; half; half /= 2)
            for (int thread = 0; thread < half; thread++)
                states[thread] = merge(states[thread], states[thread + half]);
        const State a = states[0];
        {results}
        {kernel.result};
    }}
    """


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("kernels")
    functions = (_function(kernel, real) for kernel in KERNELS.values() for real in _DTYPES)
    source = folder / "kernels.cc"
    library = folder / "kernels.so"
    source.write_text("\n".join([_ARRAY, *functions]))
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def _logits(rng: np.random.Generator, kind: Any) -> Array:
    """Ordinary rows, and rows with equal, infinite and undefined numbers, in other places."""
    logits = rng.normal(0, 5, (_ROWS, _COLUMNS)).astype(kind)
    logits[1] = 2
    logits[2, [3, 515, 600]] = 90
    logits[3, [600, 20]] = np.inf
    logits[4, :600] = -np.inf
    logits[5] = -np.inf
    logits[6, [7, 519, 1]] = np.nan
    logits[7, [5, 6]] = np.nan, np.inf
    logits[8, 3] = -np.inf
    return logits


def _softmax_sums(rng: np.random.Generator, kind: Any) -> list[Array]:
    return [_logits(rng, kind), *np.zeros((3, _ROWS), kind)]


def _cross_entropy_gradient(rng: np.random.Generator, kind: Any) -> list[Array]:
    """The first row's target is on another rank, the second's does not count."""
    factor = rng.uniform(0.5, 1, (_ROWS, 1)).astype(kind)
    factor[1] = 0
    place = rng.integers(0, _COLUMNS, (_ROWS, 1))
    place[:3, 0] = _COLUMNS + 5, -1, -700
    return [rng.normal(9, 1, (_ROWS, 1)).astype(kind), factor, place, _logits(rng, kind)]


def _add_rows(rng: np.random.Generator, kind: Any) -> list[Array]:
    index = np.sort(rng.integers(0, 9, _N))
    places = np.arange(_N)[:, None]
    rows = rng.normal(0, 1, (_N, 5)).astype(kind)
    return [places, index, rng.permutation(_N), rows, rng.normal(0, 1, (11, 5)).astype(kind)]


def _kept(rng: np.random.Generator, kind: Any) -> list[Array]:
    keys = rng.integers(0, 1 << 32, (2, _ROWS, 1), "uint32")
    places = np.arange(_COLUMNS, dtype="uint32")[None]
    return [*keys, places, np.zeros((_ROWS, _COLUMNS), kind)]


def _windows(size: int) -> Callable[[np.random.Generator, Any], list[Array]]:
    """Whole numbers, of which many are equal, and some that are infinite or undefined."""

    def inputs(rng: np.random.Generator, kind: Any) -> list[Array]:
        odd = [np.inf, -np.inf, np.nan]
        chances = [0.0475] * 20 + [0.02, 0.02, 0.01]
        arrays = rng.choice([*range(20), *odd], (size, _N, 1), p=chances).astype(kind)
        return [*arrays, np.zeros((_N, 1), kind), np.zeros((_N, 1), "uint8")]

    return inputs


def _chosen(rng: np.random.Generator, kind: Any) -> list[Array]:
    dy, gradient = rng.normal(0, 1, (2, _N, 1)).astype(kind)
    return [dy, rng.integers(0, 4, (_N, 1), "uint8"), gradient]


_SCALARS = {"kept": {"limit": 3 << 30}, "chosen": {"place": 2}}
_INPUTS: dict[str, Callable[[np.random.Generator, Any], list[Array]]] = {
    "kept": _kept,
    "maximum_4": _windows(4),
    "maximum_9": _windows(9),
    "chosen": _chosen,
    "softmax_sums": _softmax_sums,
    "cross_entropy_gradient": _cross_entropy_gradient,
    "add_rows": _add_rows,
}


@pytest.mark.parametrize(("real", "bound"), [("float", 2e-5), ("double", 1e-12)])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_cuda_c_is_numpy(name: str, real: str, bound: float, compiled: ctypes.CDLL) -> None:
    kernel = KERNELS[name]
    rng = np.random.default_rng(1)
    kind = _DTYPES[real]
    names = kernel.reads + kernel.writes
    if name in _INPUTS:
        arrays = _INPUTS[name](rng, kind)
    else:
        arrays = [rng.uniform(0.1, 2, (_N, 1)).astype(kind) for _ in names]
    scalars = {scalar: rng.uniform(0.1, 0.9) for scalar in kernel.scalars} | _SCALARS.get(name, {})
    expected = [array.copy() for array in arrays]
    kernel.host(*expected, **scalars)
    actual = [array.copy() for array in arrays]
    function: Callable[..., None] = getattr(compiled, f"{name}_{real}")
    numbers = [np.array(value, kernel.types.get(key, kind)) for key, value in scalars.items()]
    given: list[Any] = [number.ctypes.data_as(ctypes.c_void_p) for number in numbers]
    for array in actual:
        rows, columns = array.shape if array.ndim > 1 else (array.size, 1)
        given += [array.ctypes.data_as(ctypes.c_void_p), *map(ctypes.c_longlong, (rows, columns))]
    function(*given)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound)
    assert any(
        not np.array_equal(one, array, equal_nan=True)
        for one, array in zip(actual, arrays, strict=True)
    )


def test_nvrtc_compiles_what_cupy_makes_of_every_kernel() -> None:
    """Needs `pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12` (0.6 GB),
    which no other test without a GPU needs.
    """
    pytest.importorskip("cupy", exc_type=ImportError)
    program = Path(__file__).parent / "programs" / "cupy_kernels.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, program], env=environment, stdout=subprocess.PIPE, check=True
    )
    result = json.loads(done.stdout)
    assert result["refused"] == {}
    assert {name.split()[0] for name in result["compiled"]} == set(KERNELS)
    assert f"{ADD_ROWS.name} bfloat16" in result["compiled"]
