"""Conversion of weights between the layouts of this package's layers and of PyTorch's modules.

This package stores weights in the order in which matrix products read them: (inputs, outputs), and
images with channels last. PyTorch puts outputs first, and channels before height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from payload.device.base import Array

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TorchForm:
    """A conversion to PyTorch: reshape to ``split``, flip axes, transpose by ``order``, reshape
    again.
    """

    # The tensor's shape in PyTorch.
    shape: Shape
    split: Shape
    order: tuple[int, ...]
    reversed: tuple[int, ...] = ()

    def to_torch(self, weight: Array) -> Array:
        """Return the weight in PyTorch's layout, as a view if possible."""
        cut = np.flip(weight.reshape(self.split), self.reversed)
        return cut.transpose(self.order).reshape(self.shape)

    def from_torch(self, torch_weight: Array) -> Array:
        """Convert a weight back, from PyTorch's layout to shape ``split``, or raise ValueError."""
        cut = torch_weight.reshape([self.split[axis] for axis in self.order])
        return np.flip(cut.transpose(np.argsort(self.order)), self.reversed)


def identity(shape: Shape) -> TorchForm:
    """Return the conversion of a weight that has the same layout in this package and in PyTorch."""
    return TorchForm(shape, shape, tuple(range(len(shape))))


def reshaped(shape: Shape, torch_shape: Shape) -> TorchForm:
    """Return the conversion of a weight that PyTorch stores in the same order, but with another
    shape.
    """
    return TorchForm(torch_shape, shape, tuple(range(len(shape))))


def matrix(inputs: int, outputs: int) -> TorchForm:
    """Return the conversion from (inputs, outputs) to (outputs, inputs), as in
    ``torch.nn.Linear``.
    """
    return TorchForm((outputs, inputs), (inputs, outputs), (1, 0))


def flattened_image(image: Sequence[int], outputs: int) -> TorchForm:
    """Return the conversion from (H · W · C, outputs) to (outputs, C · H · W). image: (H, W, C)."""
    return TorchForm((outputs, math.prod(image)), (*image, outputs), (3, 2, 0, 1))


def patches(size: int, channels: int, outputs: int) -> TorchForm:
    """Return the conversion from (size · size · channels, outputs) to (outputs, channels, size,
    size).
    """
    return TorchForm((outputs, channels, size, size), (size, size, channels, outputs), (3, 2, 0, 1))


def convolution(inputs: int, kernel: int, outputs: int) -> TorchForm:
    """Return the conversion to (outputs, inputs, kernel, kernel), which also reverses both kernel
    axes.
    """
    shape = (inputs, kernel, kernel, outputs)
    return TorchForm((outputs, inputs, kernel, kernel), shape, (3, 0, 1, 2), reversed=(1, 2))
