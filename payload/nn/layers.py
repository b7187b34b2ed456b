"""Layers. B is the number of samples that this rank holds of a batch; it may be 0.

``forward`` keeps what ``backward`` needs. ``backward`` takes the gradient of the loss by the layer's output,
*sets* the gradients of its parameters, and gives the gradient by its input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from payload.device import Array, Device
from payload.nn.buffers import Parameter, Shape


class Layer(Protocol):
    """One step of a network."""

    @property
    def shapes(self) -> Sequence[Shape]:
        """Of its parameters, in the order in which ``bind`` is given them."""

    def bind(self, parameters: Sequence[Parameter], rng: np.random.Generator) -> None:
        """Take the views that are this layer's from now on, and fill in the first values."""

    def forward(self, x: Array) -> Array: ...

    def backward(self, dy: Array) -> Array: ...


class Linear:
    """y = x W + b."""

    def __init__(self, device: Device, inputs: int, outputs: int) -> None:
        self._device = device
        self._inputs = inputs
        self.shapes: Sequence[Shape] = ((inputs, outputs), (outputs,))

    def bind(self, parameters: Sequence[Parameter], rng: np.random.Generator) -> None:
        """He's initialisation, drawn on the host so that a CPU and a GPU start alike."""
        self.weight, self.bias = parameters
        drawn = rng.standard_normal(self.weight.value.shape) * math.sqrt(2 / self._inputs)
        self.weight.value[...] = self._device.asarray(drawn)
        self.bias.value[...] = 0

    def forward(self, x: Array) -> Array:
        """(B, inputs) → (B, outputs)"""
        self._x = x
        y: Array = x @ self.weight.value + self.bias.value
        return y

    def backward(self, dy: Array) -> Array:
        """(B, outputs) → (B, inputs)"""
        self._device.xp.matmul(self._x.T, dy, out=self.weight.grad)
        self.bias.grad[...] = dy.sum(axis=0)
        dx: Array = dy @ self.weight.value.T
        return dx


class ReLU:
    """y = max(x, 0)."""

    shapes: Sequence[Shape] = ()

    def bind(self, parameters: Sequence[Parameter], rng: np.random.Generator) -> None:
        """There is nothing to bind."""

    def forward(self, x: Array) -> Array:
        """Any shape."""
        self._positive = x > 0
        y: Array = x * self._positive
        return y

    def backward(self, dy: Array) -> Array:
        """Same shape."""
        dx: Array = dy * self._positive
        return dx
