"""Collectives made of messages between pairs of ranks: the ring, and a naive transport as a test
reference.

In the ring each rank sends only to its right neighbour, and every byte of a sum crosses each link
twice (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69, 2009). The array is cut into a part for each rank. During size - 1 hops every part passes
all ranks, and each rank adds its own numbers; the part is then complete at the rank with the part's
number. In size - 1 more hops the complete parts pass all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence

import numpy as np

from payload.comm.base import MpiRequest
from payload.comm.transport import MPI, LastRequests, MpiTransport, Steps, chunks
from payload.device.base import Array

MESSAGE_BYTES = 512 << 10
"""Parts are sent in messages of this size, so that a rank adds a message while the next is in
transit.
"""
_AHEAD = 4
"""Number of receives that are posted before their messages arrive."""

Count = Callable[[int], None]
"""Called with the number of bytes of every message sent."""


class Ring(MpiTransport):
    """Sums, reduce-scatters and allgathers around a ring of all ranks."""

    name = "ring"

    def _sum(self, host: Array) -> Steps:
        return ring_allreduce(self._lane_comm, host, self.count_sent)

    def _scatter(self, host: Array) -> Steps:
        return ring_reduce_scatter(self._lane_comm, host, self.count_sent)

    def _join(self, host: Array) -> Steps:
        return _Round(
            self._lane_comm, host, range(self.size - 1, 2 * self.size - 2), self.count_sent
        ).steps()


def ring_allreduce(comm: MPI.Comm, host: Array, count: Count) -> Steps:
    """Replace a flat array by its sum over ranks. count: called with the size of each message in
    bytes.
    """
    return _Round(comm, host, range(2 * comm.size - 2), count).steps()


def ring_reduce_scatter(comm: MPI.Comm, host: Array, count: Count) -> Steps:
    """Sum a flat array over ranks; each rank gets only its own part of the sum. Overwrites other
    parts.
    """
    return _Round(comm, host, range(comm.size - 1), count).steps()


class _Round:
    """Messages around the ring, in hops from each rank to its right neighbour.

    In hop h a rank sends part ``rank - 1 - h`` and receives part ``rank - 2 - h``. In hops 0 to
    size - 2 the rank adds its own numbers to the received part. The last of these parts has the
    rank's number. In later hops the received part is complete.
    """

    def __init__(self, comm: MPI.Comm, host: Array, hops: range, count: Count) -> None:
        self._comm = comm
        self._host = host
        self._hops = hops
        self._count = count
        self._rank = comm.rank
        self._size = comm.size
        self._arrivals = [
            (hop, piece) for hop in hops for piece in self._pieces(comm.rank - 2 - hop)
        ]
        self._ahead = max(1, min(_AHEAD, len(self._arrivals) // max(1, len(hops))))
        numbers = max((piece.size for _, piece in self._arrivals), default=0)
        self._scratch = np.empty((self._ahead, numbers), host.dtype)
        self._posted: deque[MpiRequest] = deque()
        self._sent: deque[MpiRequest] = deque()

    def steps(self) -> Steps:
        if self._hops:
            for piece in self._pieces(self._rank - 1 - self._hops.start):
                self._send(piece)
        for number in range(min(self._ahead, len(self._arrivals))):
            yield from self._post(number)
        for number, (hop, piece) in enumerate(self._arrivals):
            yield [self._posted.popleft()]
            if self._adds(hop):
                np.add(piece, self._receive_buffer(number), out=piece)
            if hop + 1 < self._hops.stop:
                self._send(piece)
            if number + self._ahead < len(self._arrivals):
                yield from self._post(number + self._ahead)
        yield LastRequests(self._sent)

    def _adds(self, hop: int) -> bool:
        return hop < self._size - 1

    def _send(self, piece: Array) -> None:
        self._sent.append(self._comm.Isend(piece, (self._rank + 1) % self._size))
        self._count(piece.nbytes)

    def _post(self, number: int) -> Steps:
        hop, piece = self._arrivals[number]
        if not self._adds(hop) and self._hops.start == 0:
            # The piece was sent a round ago. Wait until its memory may be overwritten.
            yield [self._sent.popleft()]
        target = self._receive_buffer(number) if self._adds(hop) else piece
        self._posted.append(self._comm.Irecv(target, (self._rank - 1) % self._size))

    def _receive_buffer(self, number: int) -> Array:
        _, piece = self._arrivals[number]
        return self._scratch[number % self._ahead, : piece.size]

    def _pieces(self, part: int) -> list[Array]:
        """Return the views of ``host`` that are sent as messages for a part. A part may be
        empty.
        """
        part = part % self._size
        host = self._host
        size = self._size
        own = host[host.size * part // size : host.size * (part + 1) // size]
        return [own[chunk] for chunk in chunks(own, MESSAGE_BYTES)]


class Naive(MpiTransport):
    """A slow, obviously correct transport: each rank sends its data to all ranks. Adds in order of
    rank.
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

    def _swap(
        self, outgoing: Sequence[Array]
    ) -> Generator[Sequence[MpiRequest], None, list[Array]]:
        """Send ``outgoing[rank]`` to each rank. Return the arrays received, in order of their
        senders.
        """
        incoming = [np.empty_like(outgoing[self.rank]) for _ in outgoing]
        incoming[self.rank][...] = outgoing[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        requests: list[MpiRequest] = [
            self._lane_comm.Irecv(incoming[rank], rank) for rank in others
        ]
        requests += [self._lane_comm.Isend(outgoing[rank], rank) for rank in others]
        self.count_sent(sum(outgoing[rank].nbytes for rank in others))
        yield LastRequests(requests)
        return incoming


def _total(arrays: Sequence[Array]) -> Array:
    return sum(arrays[1:], arrays[0])
