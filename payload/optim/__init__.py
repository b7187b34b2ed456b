"""Optimizers over flat arrays."""

from __future__ import annotations

from typing import Protocol

from payload.device import Array, Device


class Optimizer(Protocol):
    """Updates values by gradients."""

    state: dict[str, Array]
    """What it remembers: arrays like ``values``, by name."""

    def step(self, values: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        """Update ``values`` (N,) in place by ``scale`` times ``grads`` (N,)."""


class SGD:
    """Stochastic gradient descent with momentum: v ← momentum·v + grad, value ← value - lr·v."""

    def __init__(self, device: Device, values: Array, *, momentum: float) -> None:
        self._device, self._momentum = device, momentum
        self.state: dict[str, Array] = {"velocity": device.xp.zeros_like(values)}

    def step(self, values: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        def update(value: Array, grad: Array, velocity: Array) -> None:
            velocity *= self._momentum
            velocity += grad * scale
            value -= lr * velocity

        self._device.blocked(update, values, grads, self.state["velocity"])
