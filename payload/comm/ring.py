"""Collectives made of messages between two ranks: the ring, and the naive one that all are tested against.

The ring: each rank sends to its right neighbour only, and every byte of a sum passes each link twice
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009).
The array is cut into one part a rank. In size - 1 hops every part goes around once while all add to it, and
is then complete at the rank whose number it bears; in size - 1 more hops the complete parts go around.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence

import numpy as np

from payload.comm.base import Request
from payload.comm.transport import MPI, Last, Steps, Transport, chunks
from payload.device.base import Array

MESSAGE_BYTES = 512 << 10
"""A part goes in messages of this size, so that one is added while the next is on its way."""

_AHEAD = 4
"""So many receptions are posted before their messages come."""


Count = Callable[[int], None]
"""Is told of every byte sent."""


class Ring(Transport):
    """Sums, scatters and joins around a ring of all ranks."""

    name = "ring"

    def _sum(self, host: Array) -> Steps:
        return summed(self._lane_comm, host, self.sent)

    def _scatter(self, host: Array) -> Steps:
        return scattered(self._lane_comm, host, self.sent)

    def _join(self, host: Array) -> Steps:
        return _Round(self._lane_comm, host, range(self.size - 1, 2 * self.size - 2), self.sent).steps()


def summed(comm: MPI.Comm, host: Array, count: Count) -> Steps:
    """Replace a flat array by its sum."""
    return _Round(comm, host, range(2 * comm.size - 2), count).steps()


def scattered(comm: MPI.Comm, host: Array, count: Count) -> Steps:
    """Replace a rank's own part of a flat array by its sum."""
    return _Round(comm, host, range(comm.size - 1), count).steps()


class _Round:
    """In hop h a rank sends part ``rank - 1 - h`` and receives part ``rank - 2 - h``.

    What comes in hops 0 to size - 2 is added, the last being its own part; what comes later is complete.
    """

    def __init__(self, comm: MPI.Comm, host: Array, hops: range, count: Count) -> None:
        self._comm, self._host, self._hops, self._count = comm, host, hops, count
        self._rank, self._size = comm.rank, comm.size
        self._coming = [(hop, piece) for hop in hops for piece in self._pieces(comm.rank - 2 - hop)]
        self._ahead = max(1, min(_AHEAD, len(self._coming) // max(1, len(hops))))
        numbers = max((piece.size for _, piece in self._coming), default=0)
        self._scratch = np.empty((self._ahead, numbers), host.dtype)
        self._posted: deque[Request] = deque()
        self._sent: deque[Request] = deque()

    def steps(self) -> Steps:
        if self._hops:
            for piece in self._pieces(self._rank - 1 - self._hops.start):
                self._send(piece)
        for number in range(min(self._ahead, len(self._coming))):
            yield from self._post(number)
        for number, (hop, piece) in enumerate(self._coming):
            yield [self._posted.popleft()]
            if self._adds(hop):
                np.add(piece, self._arrival(number), out=piece)
            if hop + 1 < self._hops.stop:
                self._send(piece)
            if number + self._ahead < len(self._coming):
                yield from self._post(number + self._ahead)
        yield Last(self._sent)

    def _adds(self, hop: int) -> bool:
        return hop < self._size - 1

    def _send(self, piece: Array) -> None:
        self._sent.append(self._comm.Isend(piece, (self._rank + 1) % self._size))
        self._count(piece.nbytes)

    def _post(self, number: int) -> Steps:
        """Let the numbered message come."""
        hop, piece = self._coming[number]
        if not self._adds(hop) and self._hops.start == 0:
            yield [self._sent.popleft()]  # of this very piece, a whole round ago: it was read, as we know
        target = self._arrival(number) if self._adds(hop) else piece
        self._posted.append(self._comm.Irecv(target, (self._rank - 1) % self._size))

    def _arrival(self, number: int) -> Array:
        """Where the numbered message, which is to be added, comes in."""
        _, piece = self._coming[number]
        return self._scratch[number % self._ahead, : piece.size]

    def _pieces(self, part: int) -> list[Array]:
        """The messages of which one part consists; parts are as even as can be, and some may be empty."""
        part, host, size = part % self._size, self._host, self._size
        own = host[host.size * part // size : host.size * (part + 1) // size]
        return [own[chunk] for chunk in chunks(own, MESSAGE_BYTES)]


class Naive(Transport):
    """Every rank sends everything to every other, and adds in order of rank: slow, and plainly right.

    Its sums are the same on all ranks to the last bit.
    """

    name = "naive"

    def _sum(self, host: Array) -> Steps:
        host[...] = _total((yield from self._swap([host] * self.size)))

    def _scatter(self, host: Array) -> Steps:
        parts = np.split(host, self.size)
        parts[self.rank][...] = _total((yield from self._swap(parts)))

    def _join(self, host: Array) -> Steps:
        parts = np.split(host, self.size)
        host[...] = np.concatenate((yield from self._swap([parts[self.rank]] * self.size)))

    def _trade(self, host: Array, out: Array) -> Steps:
        out[...] = np.concatenate((yield from self._swap(np.split(host, self.size))))

    def _swap(self, outgoing: Sequence[Array]) -> Generator[Sequence[Request], None, list[Array]]:
        """Give each rank what is for it; gives what each had for this one."""
        incoming = [np.empty_like(outgoing[self.rank]) for _ in outgoing]
        incoming[self.rank][...] = outgoing[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        requests: list[Request] = [self._lane_comm.Irecv(incoming[rank], rank) for rank in others]
        requests += [self._lane_comm.Isend(outgoing[rank], rank) for rank in others]
        self.sent(sum(outgoing[rank].nbytes for rank in others))
        yield Last(requests)
        return incoming


def _total(arrays: Sequence[Array]) -> Array:
    """The sum, added in order."""
    return sum(arrays[1:], arrays[0])
