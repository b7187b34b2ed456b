"""MPI that is given device memory, for an MPI library that was built for it; others would crash on it."""

from __future__ import annotations

import ctypes
from pathlib import Path

from payload.comm.base import together
from payload.comm.staging import CudaAware
from payload.comm.steps import Steps
from payload.comm.transport import MPI, Transport, library
from payload.device import Array, Device
from payload.errors import UsageError


class CudaAwareMpi(Transport):
    """MPI's own blocking collectives on device memory, each when its turn comes.

    None of it goes on beside the computation: Open MPI's non-blocking sums do not take device memory.
    """

    name = "mpi"

    def __init__(
        self, device: Device, comm: MPI.Comm | None = None, *, staging: CudaAware | None = None
    ) -> None:
        """The first time, ask the library whether it takes device memory, and only then give it some: a small
        sum, which is checked. So nothing crashes but a library that is wrong about itself.

        Raises:
            UsageError: it does not; on every rank.
        """
        super().__init__(device, comm, staging=staging or CudaAware(device))
        if staging is None:
            together(self, _check)
            ones = device.xp.ones(1 << 10, "float32")
            self.allreduce(ones)
            right = bool((ones == self.size).all())
            together(self, lambda: _refuse_unless(right, "its sum of a small array on the GPU is wrong"))

    def _sum(self, host: Array) -> Steps:
        self._summed_bytes += host.nbytes
        self._lane_comm.Allreduce(MPI.IN_PLACE, host)
        yield ()

    def _scatter(self, host: Array) -> Steps:
        self.sent(self._others(host.nbytes))
        mine = self.device.xp.empty(host.size // self.size, host.dtype)
        self.device.synchronize()
        self._lane_comm.Reduce_scatter_block(host, mine)
        host[self._own(host)] = mine
        yield ()

    def _join(self, host: Array) -> Steps:
        self.sent(self._others(host.nbytes))
        self._lane_comm.Allgather(MPI.IN_PLACE, host)
        yield ()

    def _trade(self, host: Array, out: Array) -> Steps:
        self.sent(self._others(host.nbytes))
        self._lane_comm.Alltoall(host, out)
        yield ()


def takes_device_memory() -> bool:
    """Whether the MPI library in this process says that it was built for CUDA (MPIX_Query_cuda_support, which
    Open MPI and MPICH have); one that does not know the question was not."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/libmpi" in line}
    for path in sorted(paths):
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def _check() -> None:
    _refuse_unless(takes_device_memory(), "it says that it was built without CUDA")


def _refuse_unless(good: bool, why: str) -> None:
    """
    Raises:
        UsageError: it is not.
    """
    if not good:
        raise UsageError(f"--cuda-aware: {library()} takes no device memory: {why}; leave this flag out")
