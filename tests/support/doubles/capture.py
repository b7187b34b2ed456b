"""A double of CuPy's streams, CUDA graphs and memory pools, on the double of CuPy.

A stream that is captured notes each operation, and a launch repeats exactly these, on the same
memory and with the same numbers of the host: so a number that should differ between launches, but
was recorded, gives wrong results. Nothing seems to have run when the capture ends. It refuses what
CuPy 14.2 and CUDA refuse (`cupy/cuda/stream.pyx`, `cupy/cuda/memory.pyx`,
`cupy_backends/cuda/libs/cublas.pyx`, and CuPy's own tests of failures in `test_graph.py`), and
graphs whose temporary memory came from a pool that has given it to others since.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from payload.device.base import Array
from payload.device.gpu import UploadStream
from tests.support.doubles import cublaslt, cudnn
from tests.support.doubles.strict import Capture, Strict, StrictArray, refuse_in_capture, run

_UNIT = 512
"""Bytes of which a pool allocates a multiple: `ALLOCATION_UNIT_SIZE` in cupy/cuda/memory.pyx."""


class MemoryPool:
    """cupy.cuda.MemoryPool's double. lost: bytes that the pool had to free, for lack of memory."""

    lost = 0

    def __init__(self, allocator: Callable[[int], MemoryPointer]) -> None:
        self._allocator = allocator
        self._total = 0

    def malloc(self, nbytes: int) -> None:
        rounded = -(-nbytes // _UNIT) * _UNIT
        assert isinstance(self._allocator(rounded), MemoryPointer)
        self._total += rounded

    def total_bytes(self) -> int:
        return self._total - MemoryPool.lost

    def free_all_blocks(self) -> None:
        if Capture.current:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")


class Memory:
    """cupy.cuda.Memory's double."""

    def __init__(self, size: int) -> None:
        assert size % _UNIT == 0


class MemoryPointer:
    """cupy.cuda.MemoryPointer's double."""

    def __init__(self, mem: Memory, offset: int) -> None:
        assert isinstance(mem, Memory)
        assert offset == 0


_allocators: list[Callable[[int], object]] = []


@contextmanager
def using_allocator(allocator: Callable[[int], object]) -> Iterator[None]:
    _allocators.append(allocator)
    try:
        yield
    finally:
        _allocators.pop()


class _Recording:
    """The operations that a stream has recorded."""

    def __init__(self) -> None:
        self._works: list[tuple[Callable[[], Any], Any]] = []
        # Arrays that were changed while recording, with what they held.
        self._before: list[tuple[Array, Array]] = []
        # Arrays of this graph, each with the pool of its memory. None: the default pool.
        self._owned: list[tuple[weakref.ref[StrictArray], weakref.ref[Any] | None]] = []
        self._memory: list[Array] = []

    def run(self, work: Callable[[], Any], written: Sequence[Array]) -> Any:
        self._before += [(array, array.copy()) for array in written]
        with np.errstate(all="ignore"):
            found = work()
        if isinstance(found, np.generic):
            found = np.array(found)
        self._works.append((work, found))
        return found

    def own(self, array: StrictArray) -> None:
        pool = None
        if _allocators:
            _allocators[-1](array.nbytes)
            pool = weakref.ref(getattr(_allocators[-1], "__self__", None))
        self._owned.append((weakref.ref(array), pool))
        self._memory.append(array._inner)

    def undo(self) -> None:
        """Restore what was there before, because nothing has run."""
        for array, before in reversed(self._before):
            array[...] = before
        self._before.clear()

    def launch(self) -> None:
        for array, pool in self._owned:
            given_away = array() is None if pool is None else pool() is None
            assert not given_away, "the graph's memory has been given to others"
        for work, found in self._works:
            _refill(found, work())


def _refill(found: Any, result: Any) -> None:
    if isinstance(found, tuple | list):
        for one, other in zip(found, result, strict=True):
            _refill(one, other)
    elif isinstance(found, np.ndarray) and found is not result:
        found[...] = result


class Graph:
    """cupy.cuda.Graph's double."""

    launches = 0

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording

    def launch(self) -> None:
        assert Capture.current is None
        Graph.launches += 1
        self._recording.launch()


_streams: list[Stream] = []


class Stream:
    """cupy.cuda.Stream's double, which captures."""

    made = 1

    def __init__(self, *, non_blocking: bool = False) -> None:
        Stream.made += 1
        self.ptr = Stream.made
        self._non_blocking = non_blocking
        self._works: deque[Callable[[], object]] = deque()
        self._put = 0
        self._recording: _Recording | None = None

    def __enter__(self) -> Stream:
        _streams.append(self)
        _select()
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()
        _select()

    def begin_capture(self) -> None:
        if not self._non_blocking:
            raise RuntimeError("cudaErrorStreamCaptureImplicit")
        assert self._recording is None
        self._recording = _Recording()
        _select()

    def end_capture(self) -> Graph:
        recording = self._recording
        assert recording, "cudaErrorIllegalState"
        self._recording = None
        _select()
        recording.undo()
        return Graph(recording)

    def synchronize(self) -> None:
        if self._recording:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")
        self.work_until(self._put)

    def put(self, work: Callable[[], object]) -> None:
        """Queue a copy, which runs when something waits for an event after it."""
        self._works.append(work)
        self._put += 1

    def record(self) -> Event:
        return Event(self, self._put)

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def work_until(self, count: int) -> None:
        while self._put - len(self._works) < count:
            self._works.popleft()()

    def has_done(self, count: int) -> bool:
        return self._put - len(self._works) >= count


class Event:
    """cupy.cuda.Event's double. stream: None if its work is done at once."""

    def __init__(self, stream: Stream | None = None, count: int = 0) -> None:
        self._stream = stream
        self._count = count
        self.time = time.perf_counter()

    @property
    def done(self) -> bool:
        return self._stream is None or self._stream.has_done(self._count)

    def record(self) -> None:
        """Record it on the default stream."""

    def synchronize(self) -> None:
        if self._stream:
            self._stream.work_until(self._count)


class _Default:
    """The default stream, which does its work at once."""

    ptr = 1

    def record(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        refuse_in_capture(RuntimeError("the current stream is capturing"))


_DEFAULT = _Default()


def _select() -> None:
    Capture.current = _streams[-1]._recording if _streams else None


def _current() -> Any:
    return _streams[-1] if _streams else _DEFAULT


class _Pygraph(cudnn.pygraph):
    def execute(self, tensor_dict: Any, workspace: int, *, handle: int) -> None:
        assert cudnn._streams[handle] == _current().ptr
        outputs = [one for one in self._outputs if not one.is_virtual]
        work = super().execute
        written = [one.memory(tensor_dict[one]) for one in outputs]
        run(lambda: work(tensor_dict, workspace, handle=handle), *written)


def _matmul(*arguments: Any) -> None:
    descriptor = cublaslt._objects[arguments[1]]
    # The library reads its descriptors when it is called, not when the graph is launched.
    attributes = dict(descriptor.attributes)
    result, layout, stream = arguments[10], arguments[11], arguments[15]
    assert stream == _current().ptr
    count = cublaslt._objects[layout].get(cublaslt.MatrixLayoutAttribute.BATCH_COUNT, 1)

    def work() -> None:
        descriptor.attributes = dict(attributes)
        cublaslt.matmul(*arguments)

    run(work, *(cublaslt._matrix(result, layout, index) for index in range(count)))


class Capturing(Strict):
    """A GPU with fused kernels, which records graphs."""

    def __init__(self) -> None:
        super().__init__()
        cuda = self.xp.cuda
        cuda.Stream = Stream
        cuda.Event = Event
        cuda.get_current_stream = _current
        cuda.MemoryPool = MemoryPool
        cuda.Memory = Memory
        cuda.MemoryPointer = MemoryPointer
        cuda.using_allocator = using_allocator
        self.xp.get_default_memory_pool = lambda: MemoryPool(lambda _: MemoryPointer(Memory(0), 0))
        libraries: dict[str, Any] = {
            "cudnn": SimpleNamespace(**{**vars(cudnn), "pygraph": _Pygraph}),
            "cublaslt": SimpleNamespace(**{**vars(cublaslt), "matmul": _matmul}),
        }
        self._uploads = UploadStream(self.xp)
        self.fuse(**libraries, deterministic=True)

    def use(self) -> None:
        """Select the only GPU."""
