# ruff: noqa: N802, PLR0917, ARG002  (names and arguments are CuPy's and mpi4py's)
"""A double of CUDA streams and NCCL, on MPI, which executes asynchronous work late.

Work on the current stream is executed at once. Work on another stream is executed at the third
query of an event after it, or when something waits for that event. Code that forgets to wait
therefore reads old numbers.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from payload.comm.base import MpiRequest
from payload.device.base import Array
from tests.support.doubles.strict import Strict

_KINDS = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)
_STREAMS: dict[int, Stream] = {}


class Later:
    def __init__(self, act: Callable[[], object], after: MpiRequest | None = None) -> None:
        self._act = act
        self._after = after
        self._looks = 0
        self.done = False

    def Test(self) -> bool:
        self._looks += 1
        if self._looks > 2 and (self._after is None or self._after.Test()):
            self.Wait()
        return self.done

    def Wait(self) -> None:
        if not self.done:
            if self._after:
                self._after.Wait()
            self._act()
            self.done = True


class Stream:
    """cupy.cuda.Stream's double."""

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking
        self.ptr = len(_STREAMS) + 1
        _STREAMS[self.ptr] = self
        self._works: deque[MpiRequest] = deque()
        self._put = self._done = 0

    def put(self, work: MpiRequest) -> None:
        self._works.append(work)
        self._put += 1

    def record(self) -> Event:
        return Event(self, self._put)

    def wait_event(self, event: Event) -> None:
        self.put(Later(event.synchronize))

    def test(self, count: int) -> bool:
        while self._done < count and self._works[0].Test():
            self._works.popleft()
            self._done += 1
        return self._done >= count

    def wait(self, count: int) -> None:
        while self._done < count:
            self._works.popleft().Wait()
            self._done += 1


class Event:
    """cupy.cuda.Event's double."""

    def __init__(self, stream: Stream | None, count: int = 0) -> None:
        self._stream = stream
        self._count = count

    @property
    def done(self) -> bool:
        return self._stream is None or self._stream.test(self._count)

    def synchronize(self) -> None:
        if self._stream:
            self._stream.wait(self._count)


_CURRENT = SimpleNamespace(
    ptr=99,
    record=lambda: Event(None),
    wait_event=lambda event: event.synchronize(),
    synchronize=lambda: None,
)


def _copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    assert kind == 4
    _STREAMS[stream].put(Later(lambda: ctypes.memmove(target, source, nbytes)))


class NcclCommunicator:
    """cupy.cuda.nccl.NcclCommunicator's double."""

    def __init__(self, size: int, unique: tuple[int, int], rank: int) -> None:
        root, number = unique
        world = MPI.COMM_WORLD
        if rank:
            world.send((rank, world.rank), root, number)
            members = world.recv(source=root, tag=number)
        else:
            others = [world.recv(tag=number) for _ in range(size - 1)]
            members = [place for _, place in sorted([(0, root), *others])]
            for member in members[1:]:
                world.send(members, member, number)
        self._comm = world.Create_group(world.group.Incl(members), number)

    def allReduce(
        self, source: int, target: int, count: int, kind: int, op: int, stream: int
    ) -> None:
        self._gather(
            _at(source, count, kind), stream, lambda all_: _fill(target, count, kind, _sum(all_))
        )

    def reduceScatter(
        self, source: int, target: int, count: int, kind: int, op: int, stream: int
    ) -> None:
        mine = slice(self._comm.rank * count, (self._comm.rank + 1) * count)
        sent = _at(source, count * self._comm.size, kind)
        self._gather(sent, stream, lambda all_: _fill(target, count, kind, _sum(all_)[mine]))

    def allGather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        everything = count * self._comm.size
        self._gather(
            _at(source, count, kind),
            stream,
            lambda all_: _fill(target, everything, kind, all_.ravel()),
        )

    def broadcast(
        self, source: int, target: int, count: int, kind: int, root: int, stream: int
    ) -> None:
        assert source == target
        _STREAMS[stream].put(self._comm.Ibcast(_at(target, count, kind), root))

    def send(self, source: int, count: int, kind: int, peer: int, stream: int) -> None:
        _STREAMS[stream].put(self._comm.Isend(_at(source, count, kind), peer))

    def recv(self, target: int, count: int, kind: int, peer: int, stream: int) -> None:
        _STREAMS[stream].put(self._comm.Irecv(_at(target, count, kind), peer))

    def _gather(self, mine: Array, stream: int, act: Callable[[Array], None]) -> None:
        everything = np.empty((self._comm.size, mine.nbytes), np.uint8)
        request = self._comm.Iallgather(mine.copy().view(np.uint8), everything)
        _STREAMS[stream].put(Later(lambda: act(everything.view(mine.dtype)), after=request))


def _at(address: int, count: int, kind: int) -> Array:
    dtype = np.dtype(getattr(ml_dtypes, _KINDS[kind], _KINDS[kind]))
    if not count:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def _fill(address: int, count: int, kind: int, numbers: Array) -> None:
    _at(address, count, kind)[...] = numbers


def _sum(arrays: Array) -> Array:
    total: Array = arrays.astype("float64").sum(axis=0).astype(arrays.dtype)
    return total


_drawn = [0]


def _draw() -> tuple[int, int]:
    _drawn[0] += 1
    return MPI.COMM_WORLD.rank, _drawn[0]


class Streamed(Strict):
    """The device of GPUs, on the doubles of CuPy, its streams and NCCL."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.gpu: Any = {"index": index, "name": self.note, "uuid": None}
        self.xp.cuda.Stream = Stream
        self.xp.cuda.get_current_stream = lambda: _CURRENT
        self.xp.cuda.runtime.memcpyAsync = _copy
        kinds = {f"NCCL_{kind.upper()}": number for number, kind in enumerate(_KINDS)}
        nccl = SimpleNamespace(
            available=True,
            NCCL_SUM=0,
            NcclCommunicator=NcclCommunicator,
            get_unique_id=_draw,
            get_version=lambda: 0,
            groupStart=lambda: None,
            groupEnd=lambda: None,
            **kinds,
        )
        doubles: dict[str, Any] = {
            "cupyx": SimpleNamespace(empty_pinned=np.empty),
            "cupy.cuda": SimpleNamespace(nccl=nccl),
        }
        sys.modules.update(doubles)
