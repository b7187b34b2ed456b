"""What all transports over MPI share: each has to say only how it sums, scatters and joins on the host.

Collectives are generators: each ``yield`` gives the requests to wait for before the next step. So one
text of an algorithm runs both blocking and, moved on between two layers, beside the computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar, Self, TypeVar

import numpy as np

from payload.comm.base import Communicator, Pending, Request
from payload.comm.staging import Staged, Staging, address, flat, staging_for
from payload.comm.world import MPI, library
from payload.device.base import Array, Cpu, Device

CHUNK_BYTES = 2 << 20
"""Large sums go in pieces that stay in cache: 100 MiB took 9 ms so, 34 ms in one call."""

T = TypeVar("T")


class Transport(Communicator):
    """The ranks of one MPI communicator.

    The methods that end in ``_steps`` are the collectives as steps, which ``lane`` runs one after the other:
    what is built on a transport makes longer ones of them.
    """

    name: ClassVar[str]

    def __init__(
        self, device: Device | None = None, comm: MPI.Comm | None = None, *, staging: Staging | None = None
    ) -> None:
        """By default all ranks of the job."""
        self.device = device or Cpu()
        self.staging = staging or staging_for(self.device)
        self.lane = Lane()
        self._under_way = self.lane.queue
        self._sent_bytes = 0
        self._summed_bytes = 0  # by MPI or NCCL, which sends a ring's share of it
        self._outbox = Lane()
        self._comm = comm or MPI.COMM_WORLD  # for messages between two, and for what is small and blocks
        self._lane_comm = self._comm.Dup()  # so that nothing else comes between the steps of the lane
        self.rank = int(self._comm.rank)
        self.size = int(self._comm.size)

    @property
    def bytes_sent(self) -> int:
        return self._sent_bytes + 2 * self._others(self._summed_bytes)

    @property
    def library(self) -> str:
        return library()

    def split(self, color: int, key: int) -> Self:
        return type(self)(self.device, self._comm.Split(color, key), staging=self.staging)

    def _sum(self, host: Array) -> Steps:
        """Replace a flat array by its sum."""
        raise NotImplementedError

    def _scatter(self, host: Array) -> Steps:
        """Replace this rank's part of a flat array by its sum; the other parts may be lost."""
        raise NotImplementedError

    def _join(self, host: Array) -> Steps:
        """Fill a flat array of which this rank has its own part."""
        raise NotImplementedError

    def _trade(self, host: Array, out: Array) -> Steps:
        """Give each rank its part of ``host``, and join what they gave in ``out``."""
        self.sent(self._others(host.nbytes))
        yield Last([self._lane_comm.Ialltoall(host, out)])

    def iallreduce(self, array: Array) -> Pending:
        return self.lane.start(self.allreduce_steps(array))

    def allreduce_steps(self, array: Array) -> Steps:
        upcast = self._upcast(array)
        staged = self.staging.of(upcast)
        yield staged.fetch()
        yield from self._sum(staged.host)
        yield Last(staged.store())
        staged.release()
        if upcast is not array:
            array[...] = upcast

    def ireduce_scatter(self, array: Array, out: Array) -> Pending:
        return self.lane.start(self.reduce_scatter_steps(array, out))

    def reduce_scatter_steps(self, array: Array, out: Array) -> Steps:
        upcast = self._upcast(array)
        own = self._own(upcast)
        staged = self.staging.of(upcast)
        yield staged.fetch()
        yield from self._scatter(staged.host)
        yield Last(staged.store(own))
        staged.release()
        mine = flat(upcast)[own]
        if address(mine) != address(out):
            flat(out)[...] = mine

    def iallgather_into(self, part: Array, out: Array) -> Pending:
        return self.lane.start(self.allgather_steps(part, out))

    def allgather_steps(self, part: Array, out: Array) -> Steps:
        own = self._own(out)
        mine = flat(out)[own]
        if address(mine) != address(part):
            mine[...] = flat(part)
        staged = self.staging.of(out)
        yield staged.fetch(own)
        yield from self._join(movable(staged.host))
        yield Last(staged.store())
        staged.release()

    def alltoall_steps(self, array: Array, out: Array) -> Steps:
        source, target = self.staging.of(array), self.staging.of(out)
        yield source.fetch()
        yield from self._trade(movable(source.host), movable(target.host))
        source.release()
        yield Last(target.store())
        target.release()

    def broadcast(self, array: Array, root: int = 0) -> None:
        self.lane.run(self._broadcast_steps(array, root))

    def _broadcast_steps(self, array: Array, root: int) -> Steps:
        staged = self.staging.of(array)
        if self.rank == root:
            yield staged.fetch()
            self.sent(array.nbytes)
        host = movable(staged.host)
        for chunk in chunks(host):
            self._lane_comm.Bcast(host[chunk], root=root)
        yield Last(staged.store())
        staged.release()

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:
        staged = self.staging.of(array)
        for request in staged.fetch():
            request.Wait()  # now: a rank may block in ``recv`` next, and must not keep its message back
        return self._outbox.start(self._send_steps(staged, dest, tag))

    def _send_steps(self, staged: Staged, dest: int, tag: int) -> Steps:
        self.sent(staged.host.nbytes)
        yield Last([self._comm.Isend(movable(staged.host), dest, tag)])
        staged.release()

    def recv(self, out: Array, source: int, tag: int = 0) -> None:
        staged = self.staging.of(out)
        self._comm.Recv(movable(staged.host), source, tag)
        for request in staged.store():
            request.Wait()
        staged.release()

    def sum(self, values: Sequence[float]) -> list[float]:
        joined = np.empty((self.size, len(values)))
        self._comm.Allgather(np.array(values, dtype=np.float64), joined)
        return [float(np.add.accumulate(column)[-1]) for column in joined.T]  # in order of rank

    def allgather(self, value: T) -> list[T]:
        return self._comm.allgather(value)

    def barrier(self) -> None:
        self._comm.Barrier()

    def sent(self, nbytes: int) -> None:
        """Count."""
        self._sent_bytes += nbytes

    def _own(self, array: Array) -> slice:
        """Return this rank's part of (size · n,), or raise ValueError."""
        n, rest = divmod(array.size, self.size)
        if rest:
            raise ValueError(f"{array.size} numbers cannot be divided evenly among {self.size} ranks")
        return slice(self.rank * n, (self.rank + 1) * n)

    def _upcast(self, array: Array) -> Array:
        """The array, or a float32 copy on the device of what has 16 bits: not every MPI can sum that."""
        narrow = array.dtype.itemsize == 2 and array.dtype.kind in "fV"  # noqa: PLR2004
        return array.astype(np.float32) if narrow else array

    def _others(self, nbytes: int) -> int:
        """What is left of so many bytes without this rank's part."""
        return nbytes * (self.size - 1) // self.size


def movable(host: Array) -> Array:
    """A view that MPI can move: it knows no numbers of 16 bits but whole ones."""
    return host.view(np.uint16) if host.dtype.itemsize == 2 else host  # noqa: PLR2004


def chunks(host: Array, nbytes: int | None = None) -> Iterator[slice]:
    """Pieces of a flat array, by default of ``CHUNK_BYTES``."""
    step = max(1, (nbytes or CHUNK_BYTES) // host.itemsize)
    return (slice(start, start + step) for start in range(0, host.size, step))


__all__ = ["CHUNK_BYTES", "MPI", "Transport", "chunks", "movable"]


Steps = Generator[Sequence[Request], None, None]


class Last(list[Request]):
    """What an operation waits for that will start no further messages: the next in its lane may begin."""


class Operation:
    """Steps under way in a lane, as a ``Pending``."""

    def __init__(self, lane: Lane, steps: Steps) -> None:
        self._lane, self._steps = lane, steps
        self._waiting: list[Request] = []
        self.settled = False
        """It starts no further messages."""
        self.done = False

    def test(self) -> bool:
        if not self.done:
            self._lane.advance()
        return self.done

    def wait(self) -> None:
        if not self.done:
            self._lane.finish(self)

    def poll(self) -> None:
        """As far as goes without waiting."""
        while not self.done:
            while self._waiting:
                if not self._waiting[-1].Test():
                    return
                self._waiting.pop()
            self._next()

    def force(self, *, until_settled: bool = False) -> None:
        """To the end, or only so far that the next operation may begin."""
        while not (self.settled if until_settled else self.done):
            while self._waiting:
                self._waiting.pop().Wait()
            self._next()

    def _next(self) -> None:
        try:
            requests = next(self._steps)
        except StopIteration:
            self.settled = self.done = True
            return
        self.settled = self.settled or isinstance(requests, Last)
        self._waiting = list(requests)


class Lane:
    """The operations of one communicator.

    MPI and NCCL ask that all ranks start what belongs together in one order. An operation of several steps
    starts its later ones whenever it is moved on, which is at another time on every rank: so each operation
    begins when those before it have started all that they will.
    """

    def __init__(self) -> None:
        self.queue: deque[Operation] = deque()

    def start(self, steps: Steps) -> Operation:
        """Put an operation last, and begin it if it is its turn."""
        operation = Operation(self, steps)
        self.queue.append(operation)
        self.advance()
        return operation

    def run(self, steps: Steps) -> None:
        """A whole operation, now."""
        self.finish(self.start(steps))

    def advance(self) -> None:
        """Move all on as far as goes without waiting."""
        for operation in self.queue:
            operation.poll()
            if not operation.settled:
                break
        self._forget()

    def finish(self, wanted: Operation) -> None:
        """Wait for one operation."""
        for operation in self.queue:
            if operation is wanted:
                break
            operation.force(until_settled=True)
        wanted.force()
        self._forget()

    def _forget(self) -> None:
        while self.queue and self.queue[0].done:
            self.queue.popleft()
