"""Gradients of matrices as products of two thin ones (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1).

Of each rank's gradient M (rows, columns), with Q (columns, r) from the last iteration:

    P = sum of M Q, made orthonormal;   Q = sum of Mᵀ P;   sum of M is about P Qᵀ

which is one step of subspace iteration. What has one dimension, or would not get smaller, is summed as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from payload.comm.compressed import Compressed, Piece
from payload.comm.steps import Steps
from payload.comm.transport import Transport
from payload.device import Array


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
    """Sends r (rows + columns) numbers for each matrix, where a ring sends 2 rows · columns."""

    name = "powersgd"

    def __init__(self, inner: Transport, *, rank: int = 4) -> None:
        super().__init__(inner)
        self._thickness = rank
        self._matrices: list[_Matrix] = []

    def attach(self, grads: Array, pieces: Sequence[Piece]) -> None:
        super().attach(grads, pieces)
        for piece in sorted(pieces, key=lambda piece: piece.start):
            rows, columns = _halves(piece.shape)
            if self._thickness * (rows + columns) < rows * columns:
                matrix = _Matrix(f"q.{piece.start}", piece.start, rows, columns)
                self._matrices.append(matrix)
                first = np.random.default_rng(piece.start).standard_normal((columns, self._thickness))
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
