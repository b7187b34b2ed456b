"""CUDA graphs: work of a GPU that a stream records once, and that then runs again in one launch.

What CuPy refuses while a stream records, such as waiting for a result, copies from the host and
cuBLAS's functions, raises an error; cuBLASLt's and cuDNN's functions are recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CapturedGraph(Generic[T]):
    """Recorded work."""

    # The result of the recorded function: arrays that each launch fills.
    result: T
    _graph: Any
    # Memory of the graph: its temporary arrays are free, but only for other graphs.
    _pool: Any

    def launch(self) -> None:
        """Run the work on the current stream, on the arrays that it was recorded with."""
        self._graph.launch()


class _Allocator:
    """Takes memory from CUDA for a pool. cuda: cupy.cuda."""

    def __init__(self, cuda: ModuleType) -> None:
        self._cuda = cuda
        self.nbytes = 0

    def __call__(self, nbytes: int) -> Any:
        self.nbytes += nbytes
        return self._cuda.MemoryPointer(self._cuda.Memory(nbytes), 0)


class GraphRecorder:
    """Records work on a stream of its own. All its graphs share a memory pool.

    Sharing is safe because all graphs are launched on the same stream, and the arrays that a graph
    returns stay allocated while its ``CapturedGraph`` is alive. xp: cupy.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._allocator = _Allocator(xp.cuda)
        self._pool = xp.cuda.MemoryPool(self._allocator)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the graphs hold."""
        return int(self._pool.total_bytes())

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        """Record the work that ``function`` queues on the current stream, without running it.

        The same work must have run before, so that kernels are compiled and plans exist. Its
        numbers of the host, such as a scale, are recorded as they are now. Raises what ``function``
        or CUDA raises if the work can't be recorded, and MemoryError if the memory does not
        suffice.
        """
        # Collect now: freeing GPU memory is not allowed while a stream records. The memory that
        # earlier work has used is needed again by the graph.
        gc.collect()
        self._xp.get_default_memory_pool().free_all_blocks()
        with self._xp.cuda.using_allocator(self._pool.malloc), self._stream:
            self._stream.begin_capture()
            try:
                result = function()
            except BaseException:
                # It raises again if the error has ended the capture.
                with suppress(Exception):
                    self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
        if self.nbytes != self._allocator.nbytes:
            # When memory is short, CuPy's pool frees arrays that the graph still uses.
            raise MemoryError("the GPU's memory does not suffice for the graph")
        return CapturedGraph(result, graph, self._pool)
