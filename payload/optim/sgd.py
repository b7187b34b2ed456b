"""Stochastic gradient descent with momentum, as in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from payload.device.base import Array, Device, Kernel
from payload.nn.module import Segment
from payload.optim.base import runs


class SGD:
    """SGD: g ← grad + decay·value; v ← momentum·v + g; value ← value - lr·v.

    With Nesterov momentum: value ← value - lr·(g + momentum·v).
    """

    def __init__(
        self,
        device: Device,
        weights: Array,
        segments: Sequence[Segment],
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self._device = device
        self._momentum = momentum
        self._kernel = _NESTEROV if nesterov else _PLAIN
        self._runs = runs(segments, weight_decay)
        self.updates = 0
        self.state: dict[str, Array] = {"velocity": device.xp.zeros_like(weights)}

    def step(self, weights: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        self.updates += 1
        velocity = self.state["velocity"]
        for run, decay in self._runs:
            scalars = {"lr": lr, "scale": scale, "momentum": self._momentum, "decay": decay}
            self._device.apply(self._kernel, scalars, grads[run], weights[run], velocity[run])


def _plain(
    grad: Array,
    value: Array,
    velocity: Array,
    *,
    lr: float,
    scale: float,
    momentum: float,
    decay: float,
) -> None:
    velocity *= momentum
    velocity += _decayed(grad, value, scale, decay)
    value -= velocity * lr


def _nesterov(
    grad: Array,
    value: Array,
    velocity: Array,
    *,
    lr: float,
    scale: float,
    momentum: float,
    decay: float,
) -> None:
    gradient = _decayed(grad, value, scale, decay)
    velocity *= momentum
    velocity += gradient
    update = velocity * momentum
    update += gradient
    update *= lr
    value -= update


def _decayed(grad: Array, value: Array, scale: float, decay: float) -> Array:
    gradient = grad * scale if scale != 1 else grad
    return gradient + value * decay if decay else gradient


_SCALARS = ("lr", "scale", "momentum", "decay")
_PLAIN = Kernel(
    "sgd",
    _SCALARS,
    reads=("grad",),
    writes=("value", "velocity"),
    host=_plain,
    code="velocity = momentum * velocity + (scale * grad + decay * value); value -= lr * velocity;",
)
_NESTEROV = Kernel(
    "sgd_nesterov",
    _SCALARS,
    reads=("grad",),
    writes=("value", "velocity"),
    host=_nesterov,
    code="""
    const T gradient = scale * grad + decay * value;
    velocity = momentum * velocity + gradient;
    value -= lr * (gradient + momentum * velocity);
    """,
)
