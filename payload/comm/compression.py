"""Compressed sums of gradients, around any transport: top-k, int8 and PowerSGD.

What a rank did not send it keeps, and adds to its next gradient: error feedback (Seide et al., "1-Bit
Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019).
So what is left out is late, not lost. All ranks get the same sum to the last bit, since each makes it of
the same messages in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from payload.comm.base import CommunicatorWrapper, Pending
from payload.comm.staging import address, flat
from payload.comm.transport import Steps, Transport
from payload.device.base import Array


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """One parameter's gradient in the flat array of all."""

    start: int
    shape: tuple[int, ...]


class Compressed(CommunicatorWrapper[Transport]):
    """A communicator that sums the attached gradients in a lossy way, and all else as its transport does.

    A gradient with a number that is not finite spoils one sum, as it would without compression: what is kept
    of it counts as zero.
    """

    name: ClassVar[str]

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.state: dict[str, Array] = {}
        """What must be saved with the weights, by name, and restored in place: each rank has its own."""
        self._grads: Array | None = None

    def attach(self, grads: Array, slices: Sequence[ParamSlice]) -> None:  # noqa: ARG002
        """Compress, from here on, sums of slices of the flat array ``grads``, which ``slices`` lie in."""
        self._grads = flat(grads)
        self.state["residual"] = self.inner.device.xp.zeros(grads.shape, grads.dtype)

    def _exchange(self, kept: Array, array: Array, start: int) -> Steps:
        """Write into ``array`` the sum of what ranks send of ``kept``, and leave in that what was not sent.

        Both are flat, and begin at ``start`` of the gradients.
        """
        raise NotImplementedError

    def allreduce(self, array: Array) -> None:
        start = self._place(array)
        if start is None:
            self.inner.allreduce(array)
        else:
            self.inner.lane.run(self._steps(flat(array), start))

    def iallreduce(self, array: Array) -> Pending:
        start = self._place(array)
        if start is None:
            return self.inner.iallreduce(array)
        return self.inner.lane.start(self._steps(flat(array), start))

    def _place(self, array: Array) -> int | None:
        """Where in the gradients an array begins; None if it lies elsewhere."""
        grads = self._grads
        if grads is None or array.dtype != grads.dtype or not array.size:
            return None
        offset = address(array) - address(grads)
        return offset // grads.itemsize if 0 <= offset < grads.nbytes else None

    def _steps(self, array: Array, start: int) -> Steps:
        kept = self.state["residual"][start : start + array.size]
        kept += array
        for requests in self._exchange(kept, array, start):
            yield list(requests)  # what is the last step of a transport's may not be that of an exchange
        self.inner.device.xp.nan_to_num(kept, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


class TopK(Compressed):
    """The largest numbers of a gradient, with their places (Lin et al., "Deep Gradient Compression", 2018).

    Each rank sends ``ratio`` of its numbers, 8 bytes each, to all others: worth it below 1 / size.
    """

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


BLOCK = 256
_LARGEST = 127


class Int8(Compressed):
    """Gradients in 8 bits, with one scale for each block of numbers: about 2 bytes each, a ring sends 8.

    Each rank rounds its gradient, all ranks trade parts, and each sums its own part in float32, rounds the
    sum and gives it to all: two roundings, however many ranks there are. (A ring would round at every hop;
    gathering all gradients everywhere would send size - 1 bytes a number.) Rounding is to the nearest: it
    errs half as much as stochastic rounding, needs no random numbers, and error feedback takes its bias away.
    So do Tang et al., "1-bit Adam", ICML 2021, with fewer bits; there, the owner of a part keeps an error of
    the sum, too. Here it goes into the owner's residual, and so into the next sum just as well.
    """

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
    return packet[..., :BLOCK] * packet[..., BLOCK:].copy().view("float32")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A piece that is compressed."""

    name: str  # of its Q in the state
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class PowerSGD(Compressed):
    """Gradients of matrices as products of two thin ones (Vogels et al., "PowerSGD", 2019, algorithm 1).

    Of each rank's gradient M (rows, columns), with Q (columns, r) from the last iteration:

        P = sum of M Q, made orthonormal;   Q = sum of Mᵀ P;   sum of M is about P Qᵀ

    which is one step of subspace iteration: r (rows + columns) numbers for each matrix, where a ring sends
    2 rows · columns. What has one dimension, or would not get smaller, is summed as it is.
    """

    name = "powersgd"

    def __init__(self, inner: Transport, *, rank: int = 4) -> None:
        super().__init__(inner)
        self._thickness = rank
        self._matrices: list[_Matrix] = []

    def attach(self, grads: Array, slices: Sequence[ParamSlice]) -> None:
        super().attach(grads, slices)
        for slice_ in sorted(slices, key=lambda slice_: slice_.start):
            rows, columns = _halves(slice_.shape)
            if self._thickness * (rows + columns) < rows * columns:
                matrix = _Matrix(f"q.{slice_.start}", slice_.start, rows, columns)
                self._matrices.append(matrix)
                first = np.random.default_rng(slice_.start).standard_normal((columns, self._thickness))
                self.state[matrix.name] = self.inner.device.asarray(first, grads.dtype)

    def _exchange(self, kept: Array, array: Array, start: int) -> Steps:
        xp = self.inner.device.xp
        inside = [m for m in self._matrices if start <= m.start and m.stop <= start + len(kept)]
        gradients = [kept[m.start - start : m.stop - start].reshape(m.rows, m.columns) for m in inside]
        sums = [array[m.start - start : m.stop - start].reshape(m.rows, m.columns) for m in inside]
        rest = _between(inside, start, len(kept))

        products = [gradient @ self.state[m.name] for m, gradient in zip(inside, gradients, strict=True)]
        joined = xp.concatenate([*(p.ravel() for p in products), *(kept[place] for place in rest)])
        yield from self.inner.allreduce_steps(joined)
        *summed, _ = _split(joined, [*(p.shape for p in products), *((p.stop - p.start,) for p in rest)])
        lefts = [xp.linalg.qr(product)[0] for product in summed[: len(inside)]]
        for place, dense in zip(rest, summed[len(inside) :], strict=True):
            array[place] = dense
            kept[place] = 0
        if not inside:
            return

        rights = [gradient.T @ left for gradient, left in zip(gradients, lefts, strict=True)]
        for gradient, left, right in zip(gradients, lefts, rights, strict=True):
            xp.subtract(gradient, left @ right.T, out=gradient)
        joined = xp.concatenate([right.ravel() for right in rights])
        yield from self.inner.allreduce_steps(joined)
        *rights, _ = _split(joined, [right.shape for right in rights])
        for m, left, right, total in zip(inside, lefts, rights, sums, strict=True):
            total[...] = left @ right.T
            self._keep(m.name, right)

    def _keep(self, name: str, right: Array) -> None:
        """For the next iteration, at a size at which its product neither overflows nor vanishes; the old one
        if there were numbers that are not finite."""
        xp = self.inner.device.xp
        largest = abs(right).max()
        usable = xp.isfinite(largest) & (largest > 0)
        self.state[name][...] = xp.where(usable, right / xp.where(usable, largest, 1), self.state[name])


def _between(matrices: Sequence[_Matrix], start: int, size: int) -> list[slice]:
    """What no matrix covers of ``size`` numbers from ``start`` on, counted from there."""
    ends = [0, *(m.stop - start for m in matrices)]
    starts = [*(m.start - start for m in matrices), size]
    return [slice(end, begin) for end, begin in zip(ends, starts, strict=True)]


def _split(joined: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Arrays of these shapes that lie one behind the other, and what is left."""
    arrays, end = [], 0
    for shape in shapes:
        begin, end = end, end + math.prod(shape)
        arrays.append(joined[begin:end].reshape(shape))
    return [*arrays, joined[end:]]


def _halves(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor as the matrix that is nearest to a square, by its first axes and its last ones."""
    cuts = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
    return min(cuts, key=sum, default=(1, math.prod(shape)))


_COMPRESSORS: dict[str, type[Compressed]] = {"topk": TopK, "int8": Int8, "powersgd": PowerSGD}


def make_compressor(name: str, transport: Transport, **options: float) -> Compressed:
    """A transport that compresses sums of gradients, once they are attached.

    Args:
        options: ``ratio`` for ``topk``, ``rank`` for ``powersgd``.
    """
    return _COMPRESSORS[name](transport, **options)
