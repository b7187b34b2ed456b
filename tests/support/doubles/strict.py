"""A double of CuPy on NumPy, for machines without a GPU, which refuses what CuPy refuses or lacks.

Its arrays are not NumPy arrays, can't be mixed with them, and become NumPy arrays only by ``get``.
Names of functions and arguments are those of CuPy 14.2.0 (``cupy-14.2.0.txt``, read from its
wheel). It counts the calls that make the host wait for the device. It also refuses operations
whose results differ on a GPU: bfloat16 times a Python float, and two assignments to one index.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol
from weakref import WeakSet, ref

import ml_dtypes
import numpy as np

from payload.device.base import Array, Reduction
from payload.device.cublas import MatrixProducts
from payload.device.gpu import GpuDevice
from tests.support.doubles import cublaslt, cudnn
from tests.support.doubles.blas import PlayedCublas
from tests.support.doubles.kernels import known

_FILE = Path(__file__).with_name("cupy-14.2.0.txt")
NAMES = {line.partition(" ")[0]: line.partition(" ")[2] for line in _FILE.read_text().splitlines()}
"""Every public name, with the names of its arguments where CuPy tells them."""

_WAITING = {"nonzero", "flatnonzero", "argwhere", "unique", "compress", "extract"}
"""Functions whose result has a shape that depends on values."""
_CUBLAS = {"dot", "vdot", "inner", "outer", "tensordot", "einsum", "ndarray.dot"}
_IN_PLACE = {"ndarray.fill", "ndarray.sort", "ndarray.partition", "ndarray.put"}


class Waits:
    """How often the host waited for the device."""

    count = 0


def _wait() -> None:
    refuse_in_capture(RuntimeError("the current stream is capturing"))
    Waits.count += 1


class Recording(Protocol):
    """A stream that is being captured, see tests/support/doubles/capture.py."""

    def run(self, work: Callable[[], Any], written: Sequence[Array]) -> Any:
        """Do work as often as the graph is launched. written: existing arrays that it changes."""

    def own(self, array: StrictArray) -> None:
        """Note an array whose memory was allocated during the capture."""


class Capture:
    """The capture of the current stream."""

    current: Recording | None = None


def run(work: Callable[[], Any], *written: Array) -> Any:
    """Do work of the GPU on the current stream, which may be recording it."""
    return Capture.current.run(work, written) if Capture.current else work()


def refuse_in_capture(error: Exception) -> None:
    if Capture.current:
        raise error


def _no_cublas() -> None:
    # `setStream` in cupy_backends/cuda/libs/cublas.pyx.
    refuse_in_capture(
        NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    )


class StrictArray:
    """cupy.ndarray's double."""

    __array_ufunc__ = None  # NumPy's operators leave the work to ours, which refuse it
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, inner: Array, base: StrictArray | None = None) -> None:
        self._inner = inner
        self.base = base
        if Capture.current and base is None:
            Capture.current.own(self)

    def __array__(self, *_: object, **__: object) -> Array:
        raise TypeError("implicit conversion of a device array to a NumPy array")

    def __getattr__(self, name: str) -> Any:
        known = f"ndarray.{name}"
        if known not in NAMES:
            raise AttributeError(f"CuPy's arrays have no {name}")
        found = getattr(self._inner, name)
        if not callable(found):
            return _wrap(found, self) if name in ("T", "real", "imag") else found
        return _checked(known, found, self)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self._inner.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        return self._inner.__array_interface__

    def get(self, out: Array | None = None, blocking: bool = True) -> Array:
        if blocking:
            _wait()
        if out is None:
            return self._inner.copy()
        assert type(out) is np.ndarray
        assert out.flags.c_contiguous
        assert (out.dtype, out.shape) == (self.dtype, self.shape)
        out[...] = self._inner
        return out

    def set(self, array: Array, stream: Any = None) -> None:
        assert type(array) is np.ndarray
        assert (array.dtype, array.shape) == (self.dtype, self.shape)
        # `copy_from_host_async` in cupy/cuda/memory.pyx.
        refuse_in_capture(RuntimeError("the current stream is capturing"))
        if stream is None:
            self._inner[...] = array
            return
        target = ref(self)
        source = ref(array)

        def copy() -> None:
            to = target()
            host = source()
            assert to is not None, "the array's memory was given to others before the copy"
            assert host is not None, "the host's memory was given to others before the copy"
            to._inner[...] = host

        stream.put(copy)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> StrictArray:
        inner = _plain(index)
        if any(isinstance(part, np.ndarray) and part.dtype.kind == "b" for part in _parts(inner)):
            _wait()
        found = self._inner[inner]
        if not isinstance(found, np.ndarray):  # CuPy has no scalars
            found = self._inner[(*_parts(inner), ...)]
        elif Capture.current and not np.may_share_memory(found, self._inner):
            found = run(lambda: self._inner[inner])
        return StrictArray(found, _owner(found, self))

    def __setitem__(self, index: Any, value: Any) -> None:
        inner = _plain(index)
        arrays = [
            part
            for part in _parts(inner)
            if isinstance(part, np.ndarray) and part.dtype.kind != "b"
        ]
        if arrays:
            places = np.stack([part.ravel() for part in np.broadcast_arrays(*arrays)])
            if np.unique(places, axis=1).shape[1] != places.shape[1]:
                raise ValueError(
                    "the same place is assigned to twice: which value it gets is undefined"
                )
        plain = _plain(value)
        run(lambda: self._inner.__setitem__(inner, plain), self._inner)

    def __float__(self) -> float:
        _wait()
        return float(self._inner)

    def __int__(self) -> int:
        _wait()
        return int(self._inner)

    def __bool__(self) -> bool:
        _wait()
        return bool(self._inner)

    def __index__(self) -> int:
        _wait()
        return operator.index(self._inner)

    def item(self) -> Any:
        _wait()
        return self._inner.item()

    def tolist(self) -> Any:
        _wait()
        return self._inner.tolist()

    def __repr__(self) -> str:
        return f"device {self._inner!r}"

    def __neg__(self) -> StrictArray:
        return StrictArray(run(lambda: -self._inner))

    def __invert__(self) -> StrictArray:
        return StrictArray(run(lambda: ~self._inner))

    def __matmul__(self, other: StrictArray) -> Any:
        return _wrap(_matmul(self._inner, _plain(other)))

    def __abs__(self) -> StrictArray:
        return StrictArray(run(lambda: abs(self._inner)))


def _matmul(left: Array, right: Array) -> Array:
    """cuBLAS sums half precision in float32, and gives half precision."""
    _no_cublas()
    if left.dtype != right.dtype:
        raise TypeError(f"a product of {left.dtype} and {right.dtype}: cuBLAS has none")
    if (
        left.dtype.name == "bfloat16"
        and max(left.ndim, right.ndim) > 2
        and left.size
        and right.size
    ):
        # CuPy multiplies batches of types outside "efdFD" by a kernel without bfloat16: `matmul` in
        # cupy/_core/_routines_linalg.pyx. Seen with CuPy 14.2.0 on an H200.
        raise TypeError("data type 'E' not understood")
    if left.dtype.itemsize == 2:
        wide: Array = left.astype("float32") @ right.astype("float32")
        return wide.astype(left.dtype)
    product: Array = left @ right
    return product


def _operators() -> None:
    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
    for name in (*arithmetic, "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne"):
        act = getattr(operator, f"__{name}__")
        setattr(StrictArray, f"__{name}__", _forward(act))
        if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(StrictArray, f"__r{name}__", _backward(act))
            setattr(StrictArray, f"__i{name}__", _in_place(getattr(operator, f"__i{name}__")))


def _forward(act: Callable[[Any, Any], Any]) -> Callable[[StrictArray, Any], Any]:
    def apply(self: StrictArray, other: Any) -> Any:
        plain = _operand(self, other)
        return _wrap(run(lambda: act(self._inner, plain)))

    return apply


def _backward(act: Callable[[Any, Any], Any]) -> Callable[[StrictArray, Any], Any]:
    def apply(self: StrictArray, other: Any) -> Any:
        plain = _operand(self, other)
        return _wrap(run(lambda: act(plain, self._inner)))

    return apply


def _in_place(act: Callable[[Any, Any], Any]) -> Callable[[StrictArray, Any], Any]:
    def apply(self: StrictArray, other: Any) -> StrictArray:
        plain = _plain(other)
        run(lambda: act(self._inner, plain), self._inner)
        return self

    return apply


def _operand(array: StrictArray, other: Any) -> Any:
    if array.dtype == ml_dtypes.bfloat16 and isinstance(other, float):
        raise TypeError(
            "bfloat16 and Python's float: CuPy and NumPy give different types; do it in place"
        )
    return _plain(other)


_operators()


def _plain(value: Any) -> Any:
    """Arguments as NumPy takes them, if CuPy takes them."""
    if isinstance(value, StrictArray):
        return value._inner
    if isinstance(value, np.ndarray):
        raise TypeError("a NumPy array where CuPy wants its own")
    if isinstance(value, tuple | list):
        return type(value)(_plain(part) for part in value)
    return value


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _owner(found: Array, parent: StrictArray | None) -> StrictArray | None:
    """The array that owns the memory of what came of ``parent``."""
    if parent is None or not np.may_share_memory(found, parent._inner):
        return None
    return parent if parent.base is None else parent.base


def _wrap(found: Any, parent: StrictArray | None = None) -> Any:
    if isinstance(found, tuple | list):
        parts = [_wrap(part, parent) for part in found]
        return tuple(parts) if isinstance(found, tuple) else parts
    if isinstance(found, np.generic):
        return StrictArray(np.asarray(found))
    if not isinstance(found, np.ndarray):
        return found
    if parent is not None and found is parent._inner:
        return parent
    return StrictArray(found, _owner(found, parent))


def _checked(
    name: str, function: Callable[..., Any], parent: StrictArray | None
) -> Callable[..., Any]:
    """A function that takes what CuPy's takes."""
    allowed = NAMES[name].replace("ufunc", "out,dtype,casting").split(",")

    def call(*arguments: Any, **named: Any) -> Any:
        unknown = [each for each in named if each not in allowed]
        if unknown and allowed != [""]:
            raise TypeError(f"CuPy's {name} takes no {unknown[0]}")
        if name.rpartition(".")[2] in _WAITING:
            _wait()
        out = named.get("out")
        first = next((each for each in arguments if isinstance(each, StrictArray)), None)
        if name in _CUBLAS:
            _no_cublas()
        plain = {key: _plain(value) for key, value in named.items() if value is not None}
        positional = [_plain(each) for each in arguments]
        written = [_plain(out)] if out is not None else []
        if name in _IN_PLACE:
            assert parent is not None
            written = [parent._inner]
        found = run(lambda: function(*positional, **plain), *written)
        return out if out is not None else _wrap(found, first if parent is None else parent)

    return call


class _Module:
    """``cupy``, or a module in it."""

    def __init__(self, inner: Any, prefix: str = "") -> None:
        self._inner = inner
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        known = self._prefix + name
        if known in ("lib", "linalg", "lib.stride_tricks"):
            return _Module(getattr(self._inner, name), f"{known}.")
        if known not in NAMES:
            raise AttributeError(f"there is no cupy.{known}")
        found = getattr(self._inner, name)
        if isinstance(found, type) or not callable(found):
            return found
        return _Ufunc(known, found) if isinstance(found, np.ufunc) else _checked(known, found, None)


class _Ufunc:
    def __init__(self, name: str, inner: np.ufunc) -> None:
        self._name = name
        self._inner = inner
        if name == "add":
            self.reduceat = _checked("add.reduceat", inner.reduceat, None)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        array = next((each for each in arguments if isinstance(each, StrictArray)), None)
        if array is not None and named.get("out") is None:
            for each in arguments:
                _operand(array, each)
        return _checked(self._name, self._inner, None)(*arguments, **named)


def _cublas_handle() -> int:
    _no_cublas()
    return PlayedCublas.handle


class Ranges:
    """cupy.cuda.nvtx"""

    available = True
    names: ClassVar[list[str]] = []

    @classmethod
    def RangePush(cls, message: str) -> None:  # noqa: N802
        cls.names.append(message)

    @classmethod
    def RangePop(cls) -> None:  # noqa: N802
        cls.names.append("end")


class _Event:
    done = True

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        _wait()


class _Cupy(_Module):
    """What CuPy has of its own, and what takes arrays of the host."""

    def __init__(self) -> None:
        super().__init__(np)
        self.cuda = SimpleNamespace(
            Event=_Event,
            get_current_stream=lambda: SimpleNamespace(synchronize=_wait, ptr=99),
            nvtx=Ranges,
            get_elapsed_time=lambda start, end: (end.time - start.time) * 1e3,
            runtime=_Runtime(),
        )
        self.ElementwiseKernel = _ElementwiseKernel
        self.ReductionKernel = _ReductionKernel

    def asarray(self, a: Any, dtype: Any = None) -> StrictArray:
        if isinstance(a, StrictArray):
            wrapped: StrictArray = a if dtype is None else a.astype(dtype, copy=False)
            return wrapped
        # Copies from the host: `copy_from_host_async` in cupy/cuda/memory.pyx.
        refuse_in_capture(RuntimeError("the current stream is capturing"))
        return StrictArray(np.array(a, dtype=dtype))

    array = asarray

    def matmul(self, x1: StrictArray, x2: StrictArray, out: StrictArray | None = None) -> Any:
        product = _matmul(_plain(x1), _plain(x2))
        if out is None:
            return _wrap(product)
        assert out.dtype == product.dtype
        out[...] = StrictArray(product)
        return out


class _Runtime:
    """cupy.cuda.runtime's double: memory is registered once, and let go before it is given back."""

    def __init__(self) -> None:
        self._registered: set[int] = set()

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        assert ptr not in self._registered
        assert (size > 0, flags) == (True, 0)
        self._registered.add(ptr)

    def hostUnregister(self, ptr: int) -> None:  # noqa: N802
        self._registered.remove(ptr)


class _Kernel:
    """cupy.ElementwiseKernel's and ReductionKernel's double, which computes the payload's NumPy.

    inputs, outputs: declarations. Each letter stands for one dtype; any other type is a dtype, and
    CuPy refuses another (`_decide_params_type` in cupy/_core/_kernel.pyx).
    """

    def __init__(self, inputs: str, outputs: str, code: str, name: str) -> None:
        self._declared = [tuple(one.rsplit(" ", 1)) for one in f"{inputs}, {outputs}".split(", ")]
        self._kernel = known(name.removeprefix("payload_"))
        assert self._kernel.code == code

    def _named(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Check the types of arguments. Return them by name as NumPy takes them."""
        dtypes: dict[str, np.dtype[Any]] = {}
        given = {}
        for (declared, name), one in zip(self._declared, map(_plain, arguments), strict=True):
            kind = declared.removeprefix("raw ")
            if isinstance(one, np.ndarray):
                expected = dtypes.setdefault(kind, one.dtype) if kind.isupper() else np.dtype(kind)
                assert one.dtype == expected, f"{name} of {self._kernel.name} in {one.dtype}"
            else:
                assert math.isfinite(one)
            given[name] = one
        return given

    def _run(self, given: Mapping[str, Any]) -> None:
        kernel = self._kernel
        scalars = {name: given[name] for name in kernel.scalars}
        written = [given[name] for name in kernel.writes]
        read = [given[name] for name in kernel.reads]
        run(lambda: kernel.host(*read, *written, **scalars), *written)


class _ElementwiseKernel(_Kernel):
    def __call__(self, *arguments: Any) -> None:
        given = self._named(arguments)
        raw = {name for kind, name in self._declared if kind.startswith("raw ")}
        whole = [one for name, one in given.items() if name not in raw and np.ndim(one)]
        shape = np.broadcast_shapes(*(one.shape for one in whole))
        for name in set(self._kernel.writes) - raw:
            assert given[name].shape == shape
        if "column" in given:
            assert given["column"].tolist() == [list(range(shape[1]))]
        self._run(given)


class _ReductionKernel(_Kernel):
    def __init__(  # noqa: PLR0917 - CuPy's arguments
        self,
        inputs: str,
        outputs: str,
        map_expr: str,
        reduce_expr: str,
        post_map_expr: str,
        identity: str,
        name: str,
        *,
        reduce_type: str,
        preamble: str,
    ) -> None:
        super().__init__(inputs, outputs, preamble, name)
        kernel = self._kernel
        assert isinstance(kernel, Reduction)
        assert (map_expr, post_map_expr) == (kernel.element, kernel.result)
        assert (reduce_expr, identity, reduce_type) == ("merge(a, b)", "State()", "State")

    def __call__(self, *arguments: Any, axis: int) -> None:
        given = self._named(arguments)
        rows, columns = given[self._kernel.reads[0]].shape
        assert axis == 1
        assert given["column"].tolist() == [list(range(columns))]
        assert {given[name].shape for name in self._kernel.writes} == {(rows,)}
        self._run(given)


class Strict(GpuDevice):
    """The device of GPUs, on the double."""

    def __init__(self) -> None:
        self.xp: Any = _Cupy()
        self.note = "a double of CuPy"
        self.gpu = {"index": 0, "name": self.note, "uuid": None}
        self._empty_pinned = np.empty
        self._products = MatrixProducts(PlayedCublas(), _cublas_handle)
        self._fused = None
        self._recorders = WeakSet()
        self._staging = {}
        self._kernels = {}

    @classmethod
    def fused(cls, *, deterministic: bool = False) -> Strict:
        """Return a GPU whose 16-bit layers are computed by doubles of cuDNN and cuBLASLt."""
        device = cls()
        device.fuse(cudnn, cublaslt, deterministic=deterministic)
        return device

    def memory_bytes(self) -> int:
        return 0
