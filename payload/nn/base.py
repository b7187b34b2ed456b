"""What a layer is, and a unit of layers.

B is the number of samples in the micro-batch at hand; it may be 0. ``forward`` pushes onto the tape what
``backward`` pops. ``backward`` takes the gradient of the loss by the layer's output, *adds* to the gradients
of its parameters, and gives the gradient by its input. A layer keeps nothing of a micro-batch in itself:
several can be in flight, and a part can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from payload.comm.base import Communicator, Solo
from payload.device import Array, Device
from payload.nn.parameter import Parameter
from payload.nn.tape import Tape


@dataclass(frozen=True, slots=True)
class Context:
    """What layers are built with: where they compute, and with whom they share a tensor or a statistic."""

    device: Device
    tp: Communicator = field(default_factory=Solo)  # the ranks that hold parts of the same layers
    dp: Communicator = field(default_factory=Solo)  # the ranks that hold other samples of the same batch


class Layer(Protocol):
    """One step of a network."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """What it learns, always in the same order."""

    def forward(self, x: Array, tape: Tape) -> Array: ...

    def backward(self, dy: Array, tape: Tape) -> Array: ...


class Sequential:
    """Layers one after the other."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.parameters: Sequence[Parameter] = [p for layer in layers for p in layer.parameters]
        self.state = state_of(layers)

    def forward(self, x: Array, tape: Tape) -> Array:
        for layer in self.layers:
            x = layer.forward(x, tape)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:
        for layer in reversed(self.layers):
            dy = layer.backward(dy, tape)
        return dy


class Residual(Sequential):
    """y = x + f(x), f being layers one after the other. The first must not change x, nor the last dy."""

    def forward(self, x: Array, tape: Tape) -> Array:
        """Same shape."""
        y = super().forward(x, tape)
        y += x
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Same shape."""
        dx = super().backward(dy, tape)
        dx += dy
        return dx


def state_of(layers: Sequence[Layer]) -> dict[str, Array]:
    """What layers keep in ``state`` that is not learned by gradients, such as running statistics: arrays by
    unique name, which are saved with the parameters, and restored in place."""
    return {name: array for layer in layers for name, array in getattr(layer, "state", {}).items()}


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of layers, such as one Transformer block: what is placed on a pipeline stage, gathered and freed,
    reduced and recomputed as a whole. Between two units passes one array; the second leaves it as it was."""

    name: str
    layer: Layer
    flops: float = 0.0  # of one sample's forward pass through its matrix products, each multiply-add as 2
