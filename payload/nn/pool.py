"""Pooling over images with channels last: (B, height, width, channels)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from payload.device.base import Array, Kernel, acc_dtype, bits
from payload.nn.conv import output_size
from payload.nn.module import LayerContext, Parameter, Tape


class MaxPool2d:
    """Maximum of each window. The gradient goes to the window's first position that holds the
    maximum.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(
        self, context: LayerContext, kernel: int, *, stride: int | None = None, padding: int = 0
    ) -> None:
        """Create the layer. kernel: at most 15. stride: distance between windows. Default:
        ``kernel``, so they don't overlap.
        """
        self._device = context.device
        self._kernel = kernel
        self._stride = stride or kernel
        self._padding = padding

    def output_size(self, size: int) -> int:
        return output_size(size, self._kernel, self._stride, self._padding)

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, H, W, C) to y (B, H', W', C)."""
        xp = self._device.xp
        padded = self._pad(x)
        positions = list(self._positions(padded))
        y: Array = xp.empty(positions[0].shape, x.dtype)
        choice: Array = xp.empty(y.shape, "uint8")
        self._device.apply(maximum(len(positions)), {}, *positions, y, choice)
        tape.push(padded.shape, choice)
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        shape, choice = tape.pop()
        dx: Array = self._device.xp.zeros(shape, dy.dtype)
        for place, gradient in enumerate(self._positions(dx)):
            self._device.apply(_CHOSEN, {"place": place}, dy, choice, gradient)
        return self._unpad(dx)

    def _pad(self, x: Array) -> Array:
        if not self._padding:
            return x
        along = (self._padding, self._padding)
        return self._device.xp.pad(x, ((0, 0), along, along, (0, 0)), constant_values=-math.inf)

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


_NONE = 255
"""Choice in a window whose maximum is NaN: no position gets its gradient."""


@cache
def maximum(size: int) -> Kernel:
    """Return the kernel for the maximum of ``size`` arrays, and for the first that holds it."""
    names = tuple(f"x{place}" for place in range(size))
    # NaN stays, as in NumPy's maximum.
    steps = " ".join(
        f"if ({name} > best || {name} != {name}) {{ best = {name}; at = {place}; }}"
        for place, name in enumerate(names[1:], 1)
    )
    code = f"T best = x0; int at = 0; {steps} y = best; choice = best != best ? {_NONE} : at;"
    types = {"choice": "uint8"}
    return Kernel(f"maximum_{size}", (), names, ("y", "choice"), _write_maximum, code, types)


def _write_maximum(*arrays: Array) -> None:
    *positions, y, choice = arrays
    y[...] = positions[0]
    choice[...] = 0
    for place, position in enumerate(positions[1:], 1):
        # Places rise, so the last that was higher than all before it holds the maximum.
        np.maximum(choice, (position > y).view("uint8") * np.uint8(place), out=choice)
        np.maximum(y, position, out=y)
    np.maximum(choice, (y != y).view("uint8") * np.uint8(_NONE), out=choice)  # noqa: PLR0124


def _add_chosen(dy: Array, choice: Array, gradient: Array, *, place: int) -> None:
    np.add(gradient, (bits(dy) * (choice == place)).view(dy.dtype), out=gradient)


_CHOSEN = Kernel(
    "chosen",
    ("place",),
    reads=("dy", "choice"),
    writes=("gradient",),
    host=_add_chosen,
    code="if (choice == place) gradient = T(gradient + dy);",
    types={"place": "uint8", "choice": "uint8"},
)


class GlobalAveragePool:
    """Mean of each channel over the whole image."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, context: LayerContext) -> None:
        self._xp = context.device.xp

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, H, W, C) to y (B, C)."""
        tape.push(x.shape)
        # NumPy would sum bfloat16 in bfloat16.
        return x.mean(axis=(1, 2), dtype=acc_dtype(x.dtype)).astype(x.dtype, copy=False)

    def backward(self, dy: Array, tape: Tape) -> Array:
        (shape,) = tape.pop()
        dx: Array = self._xp.empty(shape, dy.dtype)
        dx[...] = (dy / (shape[1] * shape[2]))[:, None, None]
        return dx
