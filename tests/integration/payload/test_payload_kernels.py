"""What kernels compute on a GPU, compiled for the CPU: the same as their NumPy."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import pytest

import payload.nn
import payload.optim
from payload.device.base import Array, Kernel

_N = 1000


def _kernels() -> dict[str, Kernel]:
    folders = ((package.__name__, package.__path__) for package in (payload.nn, payload.optim))
    modules = (
        import_module(f"{name}.{found.name}")
        for name, path in folders
        for found in iter_modules(path)
    )
    known = chain.from_iterable(vars(module).values() for module in modules)
    return {kernel.name: kernel for kernel in known if isinstance(kernel, Kernel)}


KERNELS = _kernels()


def _function(kernel: Kernel, real: str) -> str:
    """C++ that runs a kernel's CUDA C for each element, as CuPy does."""
    given = [f"{real} {name}" for name in kernel.scalars]
    given += [f"const {real} *all_{name}" for name in kernel.reads]
    given += [f"{real} *all_{name}" for name in kernel.writes]
    element = [f"const T &{name} = all_{name}[i];" for name in kernel.reads]
    element += [f"T &{name} = all_{name}[i];" for name in kernel.writes]
    return f"""
    extern "C" void {kernel.name}_{real}({", ".join(given)}) {{
        typedef {real} T;
        for (int i = 0; i < {_N}; i++) {{ {" ".join(element)} {kernel.code} }}
    }}
    """


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("kernels")
    functions = (
        _function(kernel, real) for kernel in KERNELS.values() for real in ("float", "double")
    )
    source = folder / "kernels.cc"
    library = folder / "kernels.so"
    source.write_text("\n".join(["#include <cmath>", "using namespace std;", *functions]))
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(("real", "bound"), [("float", 2e-5), ("double", 1e-12)])
@pytest.mark.parametrize("name", KERNELS)
def test_cuda_c_is_numpy(name: str, real: str, bound: float, compiled: ctypes.CDLL) -> None:
    kernel = KERNELS[name]
    rng = np.random.default_rng(1)
    scalars = {scalar: rng.uniform(0.1, 0.9) for scalar in kernel.scalars}
    dtype, number = ("float32", ctypes.c_float) if real == "float" else ("float64", ctypes.c_double)
    arrays = [rng.uniform(0.1, 2, _N).astype(dtype) for _ in kernel.reads + kernel.writes]
    actual: list[Array] = [array.copy() for array in arrays]
    kernel.host(*actual, **scalars)
    expected = [array.copy() for array in arrays]
    function: Callable[..., None] = getattr(compiled, f"{name}_{real}")
    function(
        *(number(value) for value in scalars.values()),
        *(array.ctypes.data_as(ctypes.c_void_p) for array in expected),
    )
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound)
    assert any((one != array).any() for one, array in zip(actual, arrays, strict=True))
