"""Everyone sends everything to everyone, and adds in order of rank: slow, and plainly right.

All other transports are tested against it. Its sums are the same on all ranks to the last bit.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from payload.comm.steps import Last, Request, Steps
from payload.comm.transport import Transport
from payload.device import Array


class Naive(Transport):
    """Plain messages between each two ranks."""

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
