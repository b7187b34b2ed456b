"""Optimisers over flat buffers."""

from __future__ import annotations

from payload.device import Array, Device
from payload.nn.buffers import FlatBuffers


class SGD:
    """Stochastic gradient descent with momentum: v ← momentum·v + grad, value ← value - lr·v."""

    def __init__(self, device: Device, buffers: FlatBuffers, *, lr: float, momentum: float) -> None:
        self.lr = lr
        self._momentum = momentum
        self._buffers = buffers
        self._velocity: Array = device.xp.zeros_like(buffers.values)  # (all parameters,)

    def step(self) -> None:
        """Update all parameters in place."""
        self._velocity *= self._momentum
        self._velocity += self._buffers.grads
        self._buffers.values -= self.lr * self._velocity
