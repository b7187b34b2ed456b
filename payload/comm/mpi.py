"""The MPI transport. ``start`` starts MPI; it is finalised when the interpreter exits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import mpi4py
import numpy as np

from payload.comm.base import Pending
from payload.comm.launch import launcher_rank, pmi_complaint, size_complaint
from payload.comm.steps import Running, Steps
from payload.device import Array, Cpu, Device
from payload.errors import LaunchError, PayloadError
from payload.host import hostname

mpi4py.rc(initialize=False, finalize=True)  # not on import: where MPI cannot start, it ends the process
from mpi4py import MPI  # noqa: E402

CHUNK_BYTES = 1 << 20
"""Large sums go in pieces that stay in cache: 100 MiB took 14 ms so, 38 ms in one call."""

T = TypeVar("T")


class MpiCommunicator:
    """The ranks of one MPI communicator. Arrays of a GPU pass through host memory; MPI sees only that."""

    def __init__(self, device: Device | None = None, comm: MPI.Comm | None = None) -> None:
        """By default all ranks of the job."""
        self._comm = comm or MPI.COMM_WORLD
        self._device = device or Cpu()

    @property
    def library(self) -> str:
        return _library()

    @property
    def rank(self) -> int:
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        return int(self._comm.size)

    def split(self, color: int, key: int) -> MpiCommunicator:
        """The group of those ranks that name the same color, in order of their keys."""
        return MpiCommunicator(self._device, self._comm.Split(color, key))

    def allreduce(self, array: Array) -> None:
        with self._on_host(array) as host:
            for chunk in chunks(host):
                self._comm.Allreduce(MPI.IN_PLACE, chunk, op=MPI.SUM)

    def iallreduce(self, array: Array) -> Pending:
        return Running(self._allreduce_steps(array))

    def _allreduce_steps(self, array: Array) -> Steps:
        with self._on_host(array) as host:
            for chunk in chunks(host):
                yield [self._comm.Iallreduce(MPI.IN_PLACE, chunk, op=MPI.SUM)]

    def reduce_scatter(self, array: Array, out: Array) -> None:
        self.ireduce_scatter(array, out).wait()

    def ireduce_scatter(self, array: Array, out: Array) -> Pending:
        return Running(self._reduce_scatter_steps(array, out))

    def _reduce_scatter_steps(self, array: Array, out: Array) -> Steps:
        mine = np.empty(out.shape, out.dtype)
        with self._on_host(array) as host:
            yield [self._comm.Ireduce_scatter_block(host, mine, op=MPI.SUM)]
        self._device.from_host(mine, out)

    def allgather_into(self, part: Array, out: Array) -> None:
        self.iallgather_into(part, out).wait()

    def iallgather_into(self, part: Array, out: Array) -> Pending:
        return Running(self._allgather_steps(part, out))

    def _allgather_steps(self, part: Array, out: Array) -> Steps:
        mine = self._device.to_host(part).copy()
        joined = np.empty(out.shape, out.dtype)
        yield [self._comm.Iallgather(mine, joined)]
        self._device.from_host(joined, out)

    def broadcast(self, array: Array, root: int = 0) -> None:
        with self._on_host(array) as host:
            for chunk in chunks(host):
                self._comm.Bcast(chunk, root=root)

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:
        return Running(self._send_steps(array, dest, tag))

    def _send_steps(self, array: Array, dest: int, tag: int) -> Steps:
        host = self._device.to_host(array).copy()
        yield [self._comm.Isend(host, dest, tag)]

    def recv(self, out: Array, source: int, tag: int = 0) -> None:
        host = np.empty(out.shape, out.dtype)
        self._comm.Recv(host, source, tag)
        self._device.from_host(host, out)

    def sum(self, values: Sequence[float]) -> list[float]:
        joined = np.empty((self.size, len(values)))
        self._comm.Allgather(np.array(values, dtype=np.float64), joined)
        return [float(np.add.accumulate(column)[-1]) for column in joined.T]  # in order of rank

    def allgather(self, value: T) -> list[T]:
        values: list[T] = self._comm.allgather(value)
        return values

    def exchange(self, value: T, dest: int, source: int) -> T:
        received: T = self._comm.sendrecv(value, dest=dest, source=source)
        return received

    def barrier(self) -> None:
        self._comm.Barrier()

    @contextmanager
    def _on_host(self, array: Array) -> Iterator[Array]:
        """An array as flat host memory, which is its new content afterwards."""
        if not array.flags.c_contiguous:
            raise ValueError("only C-contiguous arrays can be sent: others have no flat view")
        host = self._device.to_host(array)
        yield host.reshape(-1)
        self._device.from_host(host, array)


def chunks(flat: Array) -> list[Array]:
    """A flat array in pieces of at most ``CHUNK_BYTES``."""
    step = CHUNK_BYTES // flat.itemsize
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def start(refusal: PayloadError | None = None) -> MpiCommunicator:
    """Join the world, before a device is chosen, and make sure that it is the whole one.

    From here on an uncaught exception ends every rank of the job, so that none waits for a dead one.

    Args:
        refusal: why this rank cannot go on, such as a file that it alone lacks.

    Raises:
        PayloadError: the ``refusal`` of the lowest rank that has one, on every rank.
        LaunchError: the launcher started another number of ranks than MPI sees, or MPI cannot start under it.
    """
    complaint = pmi_complaint(_library(), os.environ)
    if complaint:
        raise LaunchError(f"on {hostname()}: {complaint}")
    MPI.Init()
    sys.excepthook = _abort
    comm = MpiCommunicator()
    for refused in comm.allgather(refusal):
        if refused:
            raise refused
    complaints = [text for text in comm.allgather(size_complaint(comm.size, os.environ)) if text]
    if complaints:
        raise LaunchError(f"on {hostname()}: {complaints[0]}")
    return comm


def world_rank() -> int:
    """This process's rank; the launcher's word for it if MPI did not start."""
    return int(MPI.COMM_WORLD.rank) if MPI.Is_initialized() else launcher_rank(os.environ) or 0


def local_rank() -> int:
    """This process's place among the ranks of its node, from 0."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank = int(node.rank)
    node.Free()
    return rank


def _library() -> str:
    return str(MPI.Get_library_version()).splitlines()[0].split(",")[0].strip()


def _abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(f"rank {MPI.COMM_WORLD.rank} on {hostname()} aborts the job:\n")
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
