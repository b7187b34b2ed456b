"""Gradients in 8 bits, with one scale for each block of numbers.

Each rank rounds its gradient, all ranks trade parts, and each sums its own part in float32, rounds the sum
and gives it to all: two roundings, however many ranks there are, and at most 2 bytes a number on the wire.
(A ring would round at every hop; gathering all gradients everywhere would send size - 1 bytes a number.)
Rounding is to the nearest: it errs half as much as stochastic rounding, needs no random numbers, and error
feedback takes its bias away. So do Tang et al., "1-bit Adam", ICML 2021, with fewer bits; there, the owner
of a part keeps the error of the sum apart. Here it goes into the owner's residual, and so into the next sum
just as well.
"""

from __future__ import annotations

from types import ModuleType

from payload.comm.compressed import Compressed
from payload.comm.steps import Steps
from payload.device import Array

BLOCK = 256
_LARGEST = 127


class Int8(Compressed):
    """About 2 bytes for each number of a gradient, where a ring sends 8."""

    name = "int8"

    def _exchange(self, kept: Array, array: Array, start: int) -> Steps:  # noqa: ARG002
        xp, size = self.inner.device.xp, self.size
        blocks = -(-len(kept) // (size * BLOCK))  # of each part, of which there is one a rank
        padded = xp.zeros(size * blocks * BLOCK, "float32")
        padded[: len(kept)] = kept
        mine = slice(self.rank * blocks * BLOCK, min(len(kept), (self.rank + 1) * blocks * BLOCK))

        sent = _encode(xp, padded.reshape(size, blocks, BLOCK))
        kept -= _decode(sent).reshape(-1)[: len(kept)]
        received = xp.empty_like(sent)
        yield from self.inner.alltoall_steps(sent, received)
        total = _decode(received[0])
        for packet in received[1:]:
            total += _decode(packet)

        packets = xp.empty_like(sent)
        packets[self.rank] = _encode(xp, total)
        total -= _decode(packets[self.rank])
        kept[mine] += total.reshape(-1)[: max(0, mine.stop - mine.start)]
        yield from self.inner.allgather_steps(packets[self.rank], packets)
        array[...] = _decode(packets).reshape(-1)[: len(array)]


def _encode(xp: ModuleType, numbers: Array) -> Array:
    """(..., blocks, BLOCK) float32 as (..., blocks, BLOCK + 4) bytes: multiples of a scale, and the scale."""
    scales = abs(numbers).max(axis=-1, keepdims=True) / _LARGEST
    packet: Array = xp.empty((*numbers.shape[:-1], BLOCK + scales.itemsize), "int8")
    packet[..., :BLOCK] = xp.rint(numbers / xp.where(scales > 0, scales, 1))
    packet[..., BLOCK:] = scales.view("int8")
    return packet


def _decode(packet: Array) -> Array:
    """(..., blocks, BLOCK) float32"""
    numbers: Array = packet[..., :BLOCK] * packet[..., BLOCK:].copy().view("float32")
    return numbers
