"""NCCL's collectives, on a stream of their own: arrays never leave the GPUs, and the host waits for nothing.

NCCL forms a group of ranks by an id, which the first rank draws and MPI broadcasts. Blocking calls block
the stream that computes, not the host. What has 16 bits is summed as it is, and so rounded at every hop.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from payload.comm.base import Pending, Request, on_all_ranks
from payload.comm.staging import OnDevice, Staging, address, flat
from payload.comm.transport import MPI, Last, Steps, Transport
from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.node.host import hostname

_KINDS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")


class Nccl(Transport):
    """Needs a GPU for each rank. Numbers, values and barriers still pass through MPI."""

    name = "nccl"

    def __init__(
        self, device: Device | None = None, comm: MPI.Comm | None = None, *, staging: Staging | None = None
    ) -> None:
        """
        Raises:
            UsageError: some rank has no GPU for itself, or no NCCL; on every rank.
        """
        super().__init__(device, comm, staging=staging)
        places = self.allgather((hostname(), str(self.device.gpu)))
        on_all_ranks(self, lambda: _check(self.device, places, self.rank))
        self._cuda: Any = self.device.xp.cuda
        self._nccl = _library()
        self._kinds = {kind: getattr(self._nccl, f"NCCL_{kind.upper()}") for kind in _KINDS}
        self._all = self._join_group()
        self._ways: tuple[_Group, _Group] | None = None

    def _join_group(self) -> _Group:
        unique = self._comm.bcast(self._nccl.get_unique_id() if self.rank == 0 else None)
        return _Group(self._cuda, self._nccl.NcclCommunicator(self.size, unique, self.rank))

    def _way(self, *, up: bool) -> _Group:
        """Messages to higher ranks and to lower ones do not wait for each other: a pipeline sends both ways.

        Made with the first message, since only pipelines send any: every rank sends or receives one then, and
        no message is under way while they are made.
        """
        if self._ways is None:
            self._ways = self._join_group(), self._join_group()
        return self._ways[0 if up else 1]

    @property
    def library(self) -> str:
        return f"NCCL {self._nccl.get_version()}, {super().library}"

    def allreduce_steps(self, array: Array) -> Steps:
        self._summed_bytes += array.nbytes
        at, kind = address(flat(array)), self._kind(array)
        yield self._all.launch(
            lambda nccl, stream: nccl.allReduce(at, at, array.size, kind, self._nccl.NCCL_SUM, stream)
        )

    def reduce_scatter_steps(self, array: Array, out: Array) -> Steps:
        self._own(array)
        self.sent(self._others(array.nbytes))
        source, target, kind = address(flat(array)), address(flat(out)), self._kind(array)
        yield self._all.launch(
            lambda nccl, stream: nccl.reduceScatter(
                source, target, out.size, kind, self._nccl.NCCL_SUM, stream
            )
        )

    def allgather_steps(self, part: Array, out: Array) -> Steps:
        self._own(out)
        self.sent(self._others(out.nbytes))
        source, target = address(flat(part)), address(flat(out))
        yield self._all.launch(
            lambda nccl, stream: nccl.allGather(source, target, part.nbytes, self._kinds["uint8"], stream)
        )

    def alltoall_steps(self, array: Array, out: Array) -> Steps:
        self._own(array)
        self.sent(self._others(array.nbytes))
        source, target, nbytes = address(flat(array)), address(flat(out)), array.nbytes // self.size

        def launch(nccl: Any, stream: int) -> None:
            self._nccl.groupStart()
            for rank in range(self.size):
                nccl.send(source + rank * nbytes, nbytes, self._kinds["uint8"], rank, stream)
                nccl.recv(target + rank * nbytes, nbytes, self._kinds["uint8"], rank, stream)
            self._nccl.groupEnd()

        yield self._all.launch(launch)

    def _broadcast_steps(self, array: Array, root: int) -> Steps:
        self.sent(array.nbytes if self.rank == root else 0)
        at, kind = address(flat(array)), self._kinds["uint8"]
        yield self._all.launch(lambda nccl, stream: nccl.broadcast(at, at, array.nbytes, kind, root, stream))

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:  # noqa: ARG002
        """NCCL has no tags: what goes to one rank must be received in the order in which it was sent.

        All ranks of the group must take part in its first messages.
        """
        self.sent(array.nbytes)
        group = self._way(up=dest > self.rank)
        at, kind = address(flat(array)), self._kinds["uint8"]
        requests = group.launch(lambda nccl, stream: nccl.send(at, array.nbytes, kind, dest, stream))
        return self._outbox.start(_hold(array, requests))

    def recv(self, out: Array, source: int, tag: int = 0) -> None:  # noqa: ARG002
        group = self._way(up=source < self.rank)
        at, kind = address(flat(out)), self._kinds["uint8"]
        for request in group.launch(lambda nccl, stream: nccl.recv(at, out.nbytes, kind, source, stream)):
            request.Wait()

    def _kind(self, array: Array) -> int:
        try:
            return int(self._kinds[array.dtype.name])
        except KeyError:
            raise ValueError(f"NCCL cannot sum {array.dtype.name}") from None


class _Group:
    """A communicator of NCCL's, and the stream that it works on."""

    def __init__(self, cuda: Any, nccl: Any) -> None:
        self._cuda, self._nccl = cuda, nccl
        self._stream = cuda.Stream(non_blocking=True)

    def launch(self, act: Callable[[Any, int], None]) -> Last:
        """Do something after what was put on the current stream, beside what comes after it there."""
        self._stream.wait_event(self._cuda.get_current_stream().record())
        act(self._nccl, self._stream.ptr)
        return Last([OnDevice(self._stream.record(), self._cuda)])


def _hold(array: Array, requests: list[Request]) -> Steps:
    """Keep an array's memory until requests are done."""
    yield Last(requests)
    del array


def _library() -> Any:
    return importlib.import_module("cupy.cuda.nccl")  # not among what CuPy imports by itself


def _check(device: Device, places: list[tuple[str, str]], rank: int) -> None:
    """Raise UsageError if this rank cannot take part."""
    if device.gpu is None:
        raise UsageError(
            f"--comm nccl: there is no GPU{f' ({device.note})' if device.note else ''}; use mpi",
            code="no-gpu",
        )
    if not _library().available:
        raise UsageError(
            "--comm nccl: CuPy finds no NCCL; install nvidia-nccl-cu12, or use --comm mpi", code="no-nccl"
        )
    others = [other for other, place in enumerate(places) if place == places[rank] and other != rank]
    if others:
        raise UsageError(
            f"--comm nccl: it shares GPU {device.gpu['index']} with rank {others[0]}, which NCCL does not "
            "allow: start one rank for each GPU, or use --comm mpi",
            code="gpu-shared-by-ranks",
        )
