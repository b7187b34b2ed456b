"""A tensor as PyTorch's module of its name has it, and as the layers here do.

Layers here keep weights as their products read them: (inputs, outputs), and images with channels last.
PyTorch's have outputs first, and channels before height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from payload.device.base import Array

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The way from here to there: cut into the axes ``split``, of which some are reversed, put in another
    ``order``, and join them to ``shape``."""

    shape: Shape  # PyTorch's
    split: Shape
    order: tuple[int, ...]
    reversed: tuple[int, ...] = ()

    def to_torch(self, ours: Array) -> Array:
        """The same numbers in PyTorch's shape; a view where that is possible."""
        cut = np.flip(ours.reshape(self.split), self.reversed)
        return cut.transpose(self.order).reshape(self.shape)

    def from_torch(self, theirs: Array) -> Array:
        """Back again, as ``split``.

        Raises:
            ValueError: it is of another size.
        """
        cut = theirs.reshape([self.split[axis] for axis in self.order])
        return np.flip(cut.transpose(np.argsort(self.order)), self.reversed)


def same(shape: Shape) -> Form:
    """PyTorch has it as it is."""
    return Form(shape, shape, tuple(range(len(shape))))


def reshaped(ours: Shape, theirs: Shape) -> Form:
    """PyTorch has the same numbers in the same order."""
    return Form(theirs, ours, tuple(range(len(ours))))


def matrix(inputs: int, outputs: int) -> Form:
    """(inputs, outputs) → (outputs, inputs), as of ``torch.nn.Linear``"""
    return Form((outputs, inputs), (inputs, outputs), (1, 0))


def of_images(image: Sequence[int], outputs: int) -> Form:
    """(height · width · channels, outputs) → (outputs, channels · height · width): a linear layer behind an
    image that was flattened with its channels last, here, and first, there."""
    return Form((outputs, math.prod(image)), (*image, outputs), (3, 2, 0, 1))


def patches(size: int, channels: int, outputs: int) -> Form:
    """(size · size · channels, outputs) → (outputs, channels, size, size): as of ``torch.nn.Conv2d`` with a
    stride of ``size``"""
    return Form((outputs, channels, size, size), (size, size, channels, outputs), (3, 2, 0, 1))


def convolution(inputs: int, kernel: int, outputs: int) -> Form:
    """(inputs, kernel, kernel, outputs), turned by 180° → (outputs, inputs, kernel, kernel), as of
    ``torch.nn.Conv2d``, which computes a correlation"""
    shape = (inputs, kernel, kernel, outputs)
    return Form((outputs, inputs, kernel, kernel), shape, (3, 0, 1, 2), reversed=(1, 2))
