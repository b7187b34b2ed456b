"""The largest numbers of a gradient, with their places (Lin et al., "Deep Gradient Compression", 2018)."""

from __future__ import annotations

import math

from payload.comm.compressed import Compressed
from payload.comm.steps import Steps
from payload.comm.transport import Transport
from payload.device import Array


class TopK(Compressed):
    """Each rank sends ``ratio`` of its numbers, 8 bytes each, to all others: worth it below 1 / size."""

    name = "topk"

    def __init__(self, inner: Transport, *, ratio: float = 0.01) -> None:
        super().__init__(inner)
        self._ratio = ratio

    def _exchange(self, kept: Array, array: Array, start: int) -> Steps:  # noqa: ARG002
        xp = self.inner.device.xp
        count = math.ceil(self._ratio * len(kept))
        packets = xp.empty((self.size, 2, count), "int32")  # of each rank: places, and values as their bits
        places = xp.argpartition(abs(kept), len(kept) - count)[-count:]
        values = kept[places].astype("float32")
        kept[places] -= values
        packets[self.rank, 0], packets[self.rank, 1] = places, values.view("int32")
        yield from self.inner.allgather_steps(packets[self.rank], packets)
        array[...] = 0
        for places, bits in packets:
            array[places] += bits.view("float32")  # no place comes twice from one rank
