"""NCCL's collectives, on their own CUDA stream. Arrays never leave the GPUs, and the host does not
wait.

NCCL forms a group of ranks from an id that the first rank creates and MPI broadcasts. A blocking
call blocks the computing stream, not the host. 16-bit numbers are rounded at every hop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from payload.comm.base import MpiRequest, Pending, on_all_ranks
from payload.comm.staging import OnDevice, Staging, address, flat
from payload.comm.transport import MPI, LastRequests, MpiTransport, Steps
from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.node.host import hostname

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


class Nccl(MpiTransport):
    """Transport with NCCL. Every rank needs its own GPU. Scalars, Python values and barriers use
    MPI.
    """

    name = "nccl"

    def __init__(
        self,
        device: Device | None = None,
        comm: MPI.Comm | None = None,
        *,
        staging: Staging | None = None,
    ) -> None:
        """Join ``comm``. If a rank has no GPU of its own or no NCCL, raise UsageError on every
        rank.
        """
        super().__init__(device, comm, staging=staging)
        places = self.allgather((hostname(), str(self.device.gpu)))
        on_all_ranks(self, lambda: _check(self.device, places, self.rank))
        self._cuda: Any = self.device.xp.cuda
        self._nccl = _library()
        self._kinds = {kind: getattr(self._nccl, f"NCCL_{kind.upper()}") for kind in _KINDS}
        self._all = self._join_group()
        self._directions: tuple[_Group, _Group] | None = None

    def _join_group(self) -> _Group:
        unique = self._comm.bcast(self._nccl.get_unique_id() if self.rank == 0 else None)
        return _Group(self._cuda, self._nccl.NcclCommunicator(self.size, unique, self.rank))

    def _direction(self, *, up: bool) -> _Group:
        """Return the NCCL group for messages to higher ranks (``up``) or to lower ranks.

        In a pipeline, messages in each direction must not wait for the other direction. The first
        message creates both groups, because all ranks send or receive a message then, and no
        message is in progress.
        """
        if self._directions is None:
            self._directions = self._join_group(), self._join_group()
        return self._directions[0 if up else 1]

    @property
    def library(self) -> str:
        return f"NCCL {self._nccl.get_version()}, {super().library}"

    def allreduce_steps(self, array: Array) -> Steps:
        self._summed_bytes += array.nbytes
        data = address(flat(array))
        kind = self._kind(array)
        yield self._all.launch(
            lambda nccl, stream: nccl.allReduce(
                data, data, array.size, kind, self._nccl.NCCL_SUM, stream
            )
        )

    def reduce_scatter_steps(self, array: Array, out: Array) -> Steps:
        self._own_slice(array)
        self.count_sent(self._without_own_share(array.nbytes))
        source = address(flat(array))
        target = address(flat(out))
        kind = self._kind(array)
        yield self._all.launch(
            lambda nccl, stream: nccl.reduceScatter(
                source, target, out.size, kind, self._nccl.NCCL_SUM, stream
            )
        )

    def allgather_steps(self, part: Array, out: Array) -> Steps:
        self._own_slice(out)
        self.count_sent(self._without_own_share(out.nbytes))
        source = address(flat(part))
        target = address(flat(out))
        yield self._all.launch(
            lambda nccl, stream: nccl.allGather(
                source, target, part.nbytes, self._kinds["uint8"], stream
            )
        )

    def alltoall_steps(self, array: Array, out: Array) -> Steps:
        self._own_slice(array)
        self.count_sent(self._without_own_share(array.nbytes))
        source = address(flat(array))
        target = address(flat(out))
        nbytes = array.nbytes // self.size

        def launch(nccl: Any, stream: int) -> None:
            self._nccl.groupStart()
            for rank in range(self.size):
                nccl.send(source + rank * nbytes, nbytes, self._kinds["uint8"], rank, stream)
                nccl.recv(target + rank * nbytes, nbytes, self._kinds["uint8"], rank, stream)
            self._nccl.groupEnd()

        yield self._all.launch(launch)

    def _broadcast_steps(self, array: Array, root: int) -> Steps:
        self.count_sent(array.nbytes if self.rank == root else 0)
        data = address(flat(array))
        kind = self._kinds["uint8"]
        yield self._all.launch(
            lambda nccl, stream: nccl.broadcast(data, data, array.nbytes, kind, root, stream)
        )

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:  # noqa: ARG002
        """Start sending an array. NCCL has no tags: a rank must receive messages in the order of
        sending.

        All ranks must take part in the first messages, because these create the groups.
        """
        self.count_sent(array.nbytes)
        group = self._direction(up=dest > self.rank)
        data = address(flat(array))
        kind = self._kinds["uint8"]
        requests = group.launch(
            lambda nccl, stream: nccl.send(data, array.nbytes, kind, dest, stream)
        )
        return self._outbox.start(_hold(array, requests))

    def recv(self, out: Array, source: int, tag: int = 0) -> None:  # noqa: ARG002
        group = self._direction(up=source < self.rank)
        data = address(flat(out))
        kind = self._kinds["uint8"]
        for request in group.launch(
            lambda nccl, stream: nccl.recv(data, out.nbytes, kind, source, stream)
        ):
            request.Wait()

    def _kind(self, array: Array) -> int:
        try:
            return int(self._kinds[array.dtype.name])
        except KeyError:
            raise ValueError(f"NCCL cannot sum {array.dtype.name}") from None


class _Group:
    def __init__(self, cuda: Any, nccl: Any) -> None:
        self._cuda = cuda
        self._nccl = nccl
        self._stream = cuda.Stream(non_blocking=True)

    def launch(self, act: Callable[[Any, int], None]) -> LastRequests:
        """Call ``act(communicator, stream)``. ``stream`` first waits for the current stream's
        queued work.
        """
        self._stream.wait_event(self._cuda.get_current_stream().record())
        act(self._nccl, self._stream.ptr)
        return LastRequests([OnDevice(self._stream.record(), self._cuda)])


def _hold(array: Array, requests: list[MpiRequest]) -> Steps:
    """Keep an array's memory alive until requests are done."""
    yield LastRequests(requests)
    del array


def _library() -> Any:
    from cupy.cuda import nccl

    return nccl


def _check(device: Device, places: list[tuple[str, str]], rank: int) -> None:
    """Raise UsageError if this rank has no GPU or NCCL, or shares its GPU. places: by rank, (host,
    GPU).
    """
    if device.gpu is None:
        raise UsageError(
            f"--comm nccl: this rank has no GPU{f' ({device.note})' if device.note else ''}; use "
            "--comm mpi",
            code="no-gpu",
        )
    if not _library().available:
        raise UsageError(
            "--comm nccl: CuPy cannot load NCCL; install nvidia-nccl-cu12, or use --comm mpi",
            code="no-nccl",
        )
    sharing = [
        other for other, place in enumerate(places) if place == places[rank] and other != rank
    ]
    if sharing:
        raise UsageError(
            f"--comm nccl: this rank shares GPU {device.gpu['index']} with rank {sharing[0]}, "
            "which NCCL does not allow; start one rank per GPU, or use --comm mpi",
            code="gpu-shared-by-ranks",
        )
