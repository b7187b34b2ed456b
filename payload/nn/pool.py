"""Pooling over images with channels last: (B, height, width, channels)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from payload.device.base import Array, bits
from payload.nn.conv import output_size
from payload.nn.module import Context, Parameter, Tape


class MaxPool2d:
    """Maximum of each window. The gradient goes to the window's first position that holds the
    maximum.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(
        self, context: Context, kernel: int, *, stride: int | None = None, padding: int = 0
    ) -> None:
        """Create the layer. stride: distance between windows. Default: ``kernel``, so they don't
        overlap.
        """
        self._xp = context.device.xp
        self._kernel = kernel
        self._stride = stride or kernel
        self._padding = padding

    def output_size(self, size: int) -> int:
        return output_size(size, self._kernel, self._stride, self._padding)

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, H, W, C) to y (B, H', W', C)."""
        padded = self._pad(x)
        positions = self._positions(padded)
        y = next(positions).copy()
        for position in positions:
            self._xp.maximum(y, position, out=y)
        tape.push(padded, y)
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        padded, y = tape.pop()
        dx: Array = self._xp.zeros(padded.shape, dy.dtype)
        # Windows with a gradient that has no position yet.
        unassigned = self._xp.ones(y.shape, bool)
        for position, gradient in zip(self._positions(padded), self._positions(dx), strict=True):
            is_maximum = (position == y) & unassigned
            unassigned ^= is_maximum
            self._xp.add(gradient, (bits(dy) * is_maximum).view(dy.dtype), out=gradient)
        return self._unpad(dx)

    def _pad(self, x: Array) -> Array:
        if not self._padding:
            return x
        along = (self._padding, self._padding)
        return self._xp.pad(x, ((0, 0), along, along, (0, 0)), constant_values=-math.inf)

    def _unpad(self, padded: Array) -> Array:
        _, height, width, _ = padded.shape
        edge = self._padding
        return padded[:, edge : height - edge, edge : width - edge]

    def _positions(self, padded: Array) -> Iterator[Array]:
        """For each position in a window, yield the inputs of all windows at that position (B, H',
        W', C).
        """
        _, height, width, _ = padded.shape
        kernel = self._kernel
        stride = self._stride
        for i in range(kernel):
            for j in range(kernel):
                yield padded[
                    :, i : height - kernel + i + 1 : stride, j : width - kernel + j + 1 : stride
                ]


class GlobalAveragePool:
    """Mean of each channel over the whole image."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, context: Context) -> None:
        self._xp = context.device.xp

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, H, W, C) to y (B, C)."""
        tape.push(x.shape)
        return x.mean(axis=(1, 2))

    def backward(self, dy: Array, tape: Tape) -> Array:
        (shape,) = tape.pop()
        dx: Array = self._xp.empty(shape, dy.dtype)
        dx[...] = (dy / (shape[1] * shape[2]))[:, None, None]
        return dx
