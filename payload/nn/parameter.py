"""Parameters: their shapes, first values, and views into whatever buffer holds them at the moment."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from payload.device import Array
from payload.errors import UsageError

if TYPE_CHECKING:
    from payload.nn.base import Context

Shape = tuple[int, ...]
Init = Callable[[np.random.Generator, Shape], Array]
"""Draws the first values of a whole parameter, on the host."""


class Parameter:
    """One tensor that is learned, or this rank's part of it.

    ``value`` and ``grad`` are views of ``shape`` into flat buffers. Whoever holds the buffers binds them, and
    may bind others at any time between two layers: a layer must ask for them anew in each pass.
    """

    __slots__ = ("axis", "context", "decay", "fresh", "full_shape", "grad", "init", "name", "shape", "value")

    value: Array
    grad: Array

    def __init__(
        self,
        context: Context,
        name: str,
        full_shape: Shape,
        init: Init,
        *,
        axis: int | None = None,
        decay: bool | None = None,
    ) -> None:
        """
        Args:
            name: unique in the model; first values depend on it and the seed alone, whatever the layout.
            full_shape: of the whole tensor, over all tensor-parallel ranks.
            axis: that along which tensor-parallel ranks hold parts; None: each holds the whole.
            decay: whether weight decay applies; by default to matrices and larger, not to biases and gains.

        Raises:
            UsageError: ``axis`` cannot be divided evenly.
        """
        self.context, self.name, self.full_shape, self.init, self.axis = context, name, full_shape, init, axis
        self.decay = len(full_shape) > 1 if decay is None else decay
        self.fresh = True  # the gradient of this iteration is still to be set
        size = 1 if axis is None else context.tp.size
        if axis is not None and full_shape[axis] % size:
            raise UsageError(f"--tp {size} does not divide the {full_shape[axis]} rows or columns of {name}")
        self.shape: Shape = tuple(n // size if i == axis else n for i, n in enumerate(full_shape))

    @property
    def size(self) -> int:
        """Numbers in this rank's part."""
        return math.prod(self.shape)

    def first(self, seed: int) -> Array:
        """This rank's part of the first values, float64 on the host: of ``shape``."""
        rng = np.random.default_rng((seed, zlib.crc32(self.name.encode())))
        return self.part(self.init(rng, self.full_shape))

    def part(self, full: Array) -> Array:
        """This rank's part of the whole tensor."""
        if self.axis is None:
            return full
        start = self.context.tp.rank * self.shape[self.axis]
        index = (slice(None),) * self.axis + (slice(start, start + self.shape[self.axis]),)
        part: Array = full[index]
        return part

    def add(self, gradient: Array) -> None:
        """Add to the gradient: any shape of the same size and order."""
        gradient = gradient.reshape(self.shape)
        if self.fresh:
            self.grad[...] = gradient
            self.fresh = False
        else:
            self.grad += gradient

    def add_product(self, left: Array, right: Array) -> None:
        """Add left ᵀ @ right to the gradient: (N, I), (N, O) for a parameter whose rows are of O numbers."""
        device = self.context.device
        if self.fresh:
            device.matmul(left.T, right, out=self.grad.reshape(left.shape[1], right.shape[1]))
            self.fresh = False
        else:
            self.grad += device.matmul(left.T, right, dtype=self.grad.dtype).reshape(self.shape)

    def settle(self) -> None:
        """Make the gradient zero if nothing was added to it in this iteration."""
        if self.fresh:
            self.grad[...] = 0
            self.fresh = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a parameter in a flat array: ``[start, stop)`` there begins at ``offset`` of the parameter's
    own part, flattened."""

    parameter: Parameter
    start: int
    stop: int
    offset: int = 0


def zeros(_: np.random.Generator, shape: Shape) -> Array:
    """For biases."""
    return np.zeros(shape)


def ones(_: np.random.Generator, shape: Shape) -> Array:
    """For gains."""
    return np.ones(shape)


def normal(std: float) -> Init:
    """A normal distribution around 0."""
    return lambda rng, shape: rng.standard_normal(shape) * std


def uniform(limit: float) -> Init:
    """Evenly between -limit and limit."""
    return lambda rng, shape: rng.uniform(-limit, limit, shape)
