"""A multilayer perceptron: linear, ReLU, linear, ..., linear."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike

from payload.device import Array, Device
from payload.nn.buffers import FlatBuffers
from payload.nn.layers import Layer, Linear, ReLU


class MLP:
    """Maps (B, widths[0]) to (B, widths[-1])."""

    def __init__(self, device: Device, widths: Sequence[int], *, dtype: DTypeLike, seed: int) -> None:
        self.layers: list[Layer] = []
        for inputs, outputs in pairwise(widths):
            self.layers += [Linear(device, inputs, outputs), ReLU()]
        self.layers.pop()  # logits may be negative

        self.buffers = FlatBuffers(device, [shape for layer in self.layers for shape in layer.shapes], dtype)
        views = iter(self.buffers.parameters)
        rng = np.random.default_rng(seed)
        for layer in self.layers:
            layer.bind([next(views) for _ in layer.shapes], rng)

    def forward(self, x: Array) -> Array:
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, dlogits: Array) -> None:
        gradient = dlogits
        for layer in reversed(self.layers):
            gradient = layer.backward(gradient)
