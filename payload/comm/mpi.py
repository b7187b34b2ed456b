"""The MPI transport. ``start`` starts MPI; it is finalised when the interpreter exits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import mpi4py

from payload.comm.launch import launcher_rank, pmi_complaint, size_complaint
from payload.device import Array, Cpu, Device
from payload.errors import LaunchError
from payload.host import hostname

mpi4py.rc(initialize=False, finalize=True)  # not on import: where MPI cannot start, it ends the process
from mpi4py import MPI  # noqa: E402

CHUNK_BYTES = 1 << 20
"""Large sums go in pieces that stay in cache: 100 MiB took 14 ms so, 38 ms in one call."""

T = TypeVar("T")


class MpiCommunicator:
    """All ranks of the job. Arrays of a GPU pass through host memory; MPI sees only that."""

    def __init__(self, device: Device | None = None) -> None:
        self._world = MPI.COMM_WORLD
        self._device = device or Cpu()

    @property
    def library(self) -> str:
        return _library()

    @property
    def rank(self) -> int:
        return int(self._world.rank)

    @property
    def size(self) -> int:
        return int(self._world.size)

    def allreduce(self, array: Array) -> None:
        with self._on_host(array) as chunks:
            for chunk in chunks:
                self._world.Allreduce(MPI.IN_PLACE, chunk, op=MPI.SUM)

    def broadcast(self, array: Array) -> None:
        with self._on_host(array) as chunks:
            for chunk in chunks:
                self._world.Bcast(chunk, root=0)

    def allgather(self, value: T) -> list[T]:
        values: list[T] = self._world.allgather(value)
        return values

    def exchange(self, value: T, dest: int, source: int) -> T:
        received: T = self._world.sendrecv(value, dest=dest, source=source)
        return received

    @contextmanager
    def _on_host(self, array: Array) -> Iterator[list[Array]]:
        """An array as chunks of host memory, which are its new content afterwards."""
        if not array.flags.c_contiguous:
            raise ValueError(
                "only C-contiguous arrays can be sent: others have no flat view to cut in chunks"
            )
        host = self._device.to_host(array)
        flat = host.reshape(-1)
        step = CHUNK_BYTES // host.itemsize
        yield [flat[start : start + step] for start in range(0, flat.size, step)]
        self._device.from_host(host, array)


def start() -> MpiCommunicator:
    """Join the world, before a device is chosen, and make sure that it is the whole one.

    From here on an uncaught exception ends every rank of the job, so that none waits for a dead one.

    Raises:
        LaunchError: the launcher started another number of ranks than MPI sees, or MPI cannot start under it.
    """
    complaint = pmi_complaint(_library(), os.environ)
    if complaint:
        raise LaunchError(f"on {hostname()}: {complaint}")
    MPI.Init()
    sys.excepthook = _abort
    comm = MpiCommunicator()
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
