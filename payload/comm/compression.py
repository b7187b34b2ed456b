"""Compressed sums of gradients on top of any transport: top-k, int8 and PowerSGD.

A rank keeps the part of its gradient that it did not send (the residual), and adds it to its next
gradient: error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
Karimireddy et al., "Error Feedback Fixes SignSGD", 2019). So no part is lost, only delayed. All
ranks compute the sum from the same messages in the same order, so the sum is bit-identical on all
ranks.
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
from payload.comm.transport import MpiTransport, Steps
from payload.device.base import Array


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """Position and shape of a parameter's gradient in the flat array of all gradients."""

    start: int
    shape: tuple[int, ...]


class Compressed(CommunicatorWrapper[MpiTransport]):
    """A communicator that compresses sums of gradients (see ``attach``), but not sums of other
    arrays.

    Infinite or NaN numbers affect only the current sum, because 0 is stored for them in the
    residual.
    """

    name: ClassVar[str]

    def __init__(self, inner: MpiTransport) -> None:
        super().__init__(inner)
        self.state: dict[str, Array] = {}
        """This rank's own state, by name. It must be saved with the weights and restored in place.
        """
        self._grads: Array | None = None

    def attach(self, grads: Array, slices: Sequence[ParamSlice]) -> None:  # noqa: ARG002
        """From now on, compress sums of ``grads`` or parts of it. slices: where each gradient is in
        it.
        """
        self._grads = flat(grads)
        self.state["residual"] = self.inner.device.xp.zeros(grads.shape, grads.dtype)

    def _exchange(self, residual: Array, array: Array, start: int) -> Steps:
        """Sum ``residual`` over all ranks into ``array``. Keep in ``residual`` the part that was
        not sent.

        Both arrays are flat, and belong to the gradients from position ``start`` on.
        """
        raise NotImplementedError

    def allreduce(self, array: Array) -> None:
        start = self._offset_in_grads(array)
        if start is None:
            self.inner.allreduce(array)
        else:
            self.inner.lane.run(self._steps(flat(array), start))

    def iallreduce(self, array: Array) -> Pending:
        start = self._offset_in_grads(array)
        if start is None:
            return self.inner.iallreduce(array)
        return self.inner.lane.start(self._steps(flat(array), start))

    def _offset_in_grads(self, array: Array) -> int | None:
        """Return the array's position in the array of all gradients, or None if it is no part of
        them.
        """
        grads = self._grads
        if grads is None or array.dtype != grads.dtype or not array.size:
            return None
        offset = address(array) - address(grads)
        return offset // grads.itemsize if 0 <= offset < grads.nbytes else None

    def _steps(self, array: Array, start: int) -> Steps:
        residual = self.state["residual"][start : start + array.size]
        residual += array
        for requests in self._exchange(residual, array, start):
            # A plain list: the transport's ``LastRequests`` step need not be the last step of the exchange.
            yield list(requests)
        self.inner.device.xp.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


class TopK(Compressed):
    """Send the largest numbers of a gradient and their positions (Lin et al., arXiv:1712.01887).

    Each rank sends the share ``ratio`` of its numbers, 8 bytes each: this pays off if ``ratio`` < 1
    / size.
    """

    name = "topk"

    def __init__(self, inner: MpiTransport, *, ratio: float = 0.01) -> None:
        super().__init__(inner)
        self._ratio = ratio

    def _exchange(self, residual: Array, array: Array, start: int) -> Steps:  # noqa: ARG002
        xp = self.inner.device.xp
        count = math.ceil(self._ratio * len(residual))
        # For each rank: the positions, and the bits of the values.
        packets = xp.empty((self.size, 2, count), "int32")
        positions = xp.argpartition(abs(residual), len(residual) - count)[-count:]
        values = residual[positions].astype("float32")
        residual[positions] -= values
        packets[self.rank, 0] = positions
        packets[self.rank, 1] = values.view("int32")
        yield from self.inner.allgather_steps(packets[self.rank], packets)
        array[...] = 0
        for positions, bits in packets:
            # A rank sends each position at most once, so no addition is lost.
            array[positions] += bits.view("float32")


BLOCK = 256
_LARGEST = 127


class Int8(Compressed):
    """Send gradients as 8-bit integers with a scale for each block: about 2 bytes per number (a
    ring: 8).

    Each rank rounds its gradient. The ranks exchange parts; each rank sums its own part in float32,
    rounds the sum and sends it to all ranks. So numbers are rounded twice, for any number of ranks.
    (A ring would round at every hop; gathering all gradients everywhere would send size - 1 bytes
    per number.) Rounding is
    to nearest: its error is half that of stochastic rounding, it needs no random numbers, and error
    feedback removes its bias. Tang et al., "1-bit Adam", ICML 2021, do the same with fewer bits,
    and store the rounding error of the sum separately. Here the rank that rounds a sum adds the
    error to its residual, and so to the next sum.
    """

    name = "int8"

    def _exchange(self, residual: Array, array: Array, start: int) -> Steps:  # noqa: ARG002
        xp = self.inner.device.xp
        size = self.size
        # Blocks in each rank's part.
        blocks = -(-len(residual) // (size * BLOCK))
        padded = xp.zeros(size * blocks * BLOCK, "float32")
        padded[: len(residual)] = residual
        own = slice(
            self.rank * blocks * BLOCK, min(len(residual), (self.rank + 1) * blocks * BLOCK)
        )

        sent = _encode(xp, padded.reshape(size, blocks, BLOCK))
        residual -= _decode(sent).reshape(-1)[: len(residual)]
        received = xp.empty_like(sent)
        yield from self.inner.alltoall_steps(sent, received)
        total = _decode(received[0])
        for packet in received[1:]:
            total += _decode(packet)

        packets = xp.empty_like(sent)
        packets[self.rank] = _encode(xp, total)
        total -= _decode(packets[self.rank])
        residual[own] += total.reshape(-1)[: max(0, own.stop - own.start)]
        yield from self.inner.allgather_steps(packets[self.rank], packets)
        array[...] = _decode(packets).reshape(-1)[: len(array)]


def _encode(xp: ModuleType, numbers: Array) -> Array:
    """Encode float32 (..., blocks, BLOCK) as int8 (..., blocks, BLOCK + 4): BLOCK numbers and a
    scale.
    """
    scales = abs(numbers).max(axis=-1, keepdims=True) / _LARGEST
    packet: Array = xp.empty((*numbers.shape[:-1], BLOCK + scales.itemsize), "int8")
    packet[..., :BLOCK] = xp.rint(numbers / xp.where(scales > 0, scales, 1))
    packet[..., BLOCK:] = scales.view("int8")
    return packet


def _decode(packet: Array) -> Array:
    """Decode packets of ``_encode`` to float32 (..., blocks, BLOCK)."""
    return packet[..., :BLOCK] * packet[..., BLOCK:].copy().view("float32")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Position and shape, as a matrix, of a parameter's gradient that PowerSGD compresses."""

    # Key of Q in the state.
    name: str
    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class PowerSGD(Compressed):
    """Send each gradient matrix as a product of thin matrices (Vogels et al., "PowerSGD", 2019,
    algorithm 1).

    M (rows, columns) is a rank's gradient, Q (columns, r) is from the last iteration, sums are over
    ranks:

        P = sum of M Q, orthonormalized;   Q = sum of Mᵀ P;   sum of M ≈ P Qᵀ

    This is one step of subspace iteration. It sums r (rows + columns) numbers for each matrix
    instead of rows · columns. Vectors, and matrices that would not get smaller, are summed without
    compression.
    """

    name = "powersgd"

    def __init__(self, inner: MpiTransport, *, rank: int = 4) -> None:
        super().__init__(inner)
        self._thickness = rank
        self._matrices: list[_Matrix] = []

    def attach(self, grads: Array, slices: Sequence[ParamSlice]) -> None:
        super().attach(grads, slices)
        for piece in sorted(slices, key=lambda piece: piece.start):
            rows, columns = _matrix_shape(piece.shape)
            if self._thickness * (rows + columns) < rows * columns:
                matrix = _Matrix(f"q.{piece.start}", piece.start, rows, columns)
                self._matrices.append(matrix)
                initial = np.random.default_rng(piece.start).standard_normal(
                    (columns, self._thickness)
                )
                self.state[matrix.name] = self.inner.device.asarray(initial, grads.dtype)

    def _exchange(self, residual: Array, array: Array, start: int) -> Steps:
        xp = self.inner.device.xp
        inside = [m for m in self._matrices if start <= m.start and m.stop <= start + len(residual)]
        gradients = [
            residual[m.start - start : m.stop - start].reshape(m.rows, m.columns) for m in inside
        ]
        sums = [array[m.start - start : m.stop - start].reshape(m.rows, m.columns) for m in inside]
        gaps = _gaps(inside, start, len(residual))

        products = [
            gradient @ self.state[m.name] for m, gradient in zip(inside, gradients, strict=True)
        ]
        joined = xp.concatenate([*(p.ravel() for p in products), *(residual[gap] for gap in gaps)])
        yield from self.inner.allreduce_steps(joined)
        *summed, _ = _split(
            joined, [*(p.shape for p in products), *((gap.stop - gap.start,) for gap in gaps)]
        )
        lefts = [xp.linalg.qr(product)[0] for product in summed[: len(inside)]]
        for gap, dense in zip(gaps, summed[len(inside) :], strict=True):
            array[gap] = dense
            residual[gap] = 0
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
            self._save_right(m.name, right)

    def _save_right(self, name: str, right: Array) -> None:
        """Save ``right`` as the next iteration's Q, scaled against overflow, unless it is 0 or not
        finite.
        """
        xp = self.inner.device.xp
        largest = abs(right).max()
        usable = xp.isfinite(largest) & (largest > 0)
        self.state[name][...] = xp.where(
            usable, right / xp.where(usable, largest, 1), self.state[name]
        )


def _gaps(matrices: Sequence[_Matrix], start: int, size: int) -> list[slice]:
    """Return the slices that no matrix covers, of an array of ``size`` gradients from ``start``
    on.
    """
    ends = [0, *(m.stop - start for m in matrices)]
    starts = [*(m.start - start for m in matrices), size]
    return [slice(end, begin) for end, begin in zip(ends, starts, strict=True)]


def _split(joined: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Split a flat array into arrays of these shapes, followed by a flat array of the remaining
    numbers.
    """
    arrays = []
    end = 0
    for shape in shapes:
        begin = end
        end = end + math.prod(shape)
        arrays.append(joined[begin:end].reshape(shape))
    return [*arrays, joined[end:]]


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of the matrix, as square as possible, that merges a tensor's axes."""
    cuts = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
    return min(cuts, key=sum, default=(1, math.prod(shape)))


_COMPRESSORS: dict[str, type[Compressed]] = {"topk": TopK, "int8": Int8, "powersgd": PowerSGD}


def make_compressor(name: str, transport: MpiTransport, **options: float) -> Compressed:
    """Wrap a transport in the named compressor. options: ``ratio`` of ``topk``, ``rank`` of
    ``powersgd``.
    """
    return _COMPRESSORS[name](transport, **options)
