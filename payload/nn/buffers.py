"""All parameters of a model in one flat array, and all gradients in another.

Layers hold views into them. So an optimiser's step is one expression, and a sum over ranks one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import DTypeLike

from payload.device import Array, Device

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Views into the flat buffers, of one shape."""

    value: Array
    grad: Array


class FlatBuffers:
    """The parameters and gradients of one model."""

    def __init__(self, device: Device, shapes: Sequence[Shape], dtype: DTypeLike) -> None:
        """Zeros for tensors of these shapes, one behind the other."""
        size = sum(math.prod(shape) for shape in shapes)
        self.values: Array = device.xp.zeros(size, dtype)  # (all parameters,)
        self.grads: Array = device.xp.zeros(size, dtype)  # (all parameters,)
        self.parameters: list[Parameter] = []
        start = 0
        for shape in shapes:
            end = start + math.prod(shape)
            self.parameters.append(
                Parameter(self.values[start:end].reshape(shape), self.grads[start:end].reshape(shape))
            )
            start = end
