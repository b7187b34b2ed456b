"""Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from payload.device.base import Array, Device, Kernel
from payload.nn.module import Segment
from payload.optim.base import runs


class AdamW:
    """AdamW: value ← (1 - lr·decay)·value - lr·m̂ / (√v̂ + ε).

    First m ← β1·m + (1 - β1)·grad, and v ← β2·v + (1 - β2)·grad². m̂ and v̂ are m and v, corrected
    for their start at 0 (algorithm 2 of the paper).
    """

    def __init__(
        self,
        device: Device,
        weights: Array,
        segments: Sequence[Segment],
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self._device = device
        self._moments = Moments(device, weights, beta1, beta2, eps)
        self._runs = runs(segments, weight_decay)
        self.updates = 0
        self.state = self._moments.state

    def step(self, weights: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        self.updates += 1
        scalars = self._moments.scalars(lr, scale, self.updates)
        mean = self.state["mean"]
        square = self.state["square"]
        for run, decay in self._runs:
            kernel_scalars = {**scalars, "keep": 1 - lr * decay}
            self._device.apply(
                _KERNEL, kernel_scalars, grads[run], weights[run], mean[run], square[run]
            )


class Moments:
    """Running averages of the gradients and of their squares, for Adam and related optimizers."""

    def __init__(
        self, device: Device, weights: Array, beta1: float, beta2: float, eps: float
    ) -> None:
        self._beta1 = beta1
        self._beta2 = beta2
        self._eps = eps
        self.state: dict[str, Array] = {
            "mean": device.xp.zeros_like(weights),
            "square": device.xp.zeros_like(weights),
        }

    def scalars(self, lr: float, scale: float, updates: int) -> dict[str, float]:
        """Return scalars for update number ``updates``, so that rate·m / (√v + eps) = lr·m̂ / (√v̂
        + ε).
        """
        first = 1 - self._beta1**updates
        second = 1 - self._beta2**updates
        root = math.sqrt(second)
        rate = lr * root / first
        eps = self._eps * root
        return {
            "rate": rate,
            "eps": eps,
            "scale": scale,
            "beta1": self._beta1,
            "beta2": self._beta2,
        }


def update_moments(
    grad: Array, mean: Array, square: Array, *, scale: float, beta1: float, beta2: float
) -> Array:
    """Update the averages ``mean`` and ``square`` in place. Return a temporary array for the
    caller's use.
    """
    gradient = grad * scale if scale != 1 else grad
    mean *= beta1
    scratch = gradient * (1 - beta1)
    mean += scratch
    square *= beta2
    np.multiply(gradient, gradient, out=scratch)
    scratch *= 1 - beta2
    square += scratch
    return scratch


def _update(
    grad: Array,
    value: Array,
    mean: Array,
    square: Array,
    *,
    rate: float,
    keep: float,
    eps: float,
    **moments: float,
) -> None:
    scratch = update_moments(grad, mean, square, **moments)
    np.sqrt(square, out=scratch)
    scratch += eps
    np.divide(mean, scratch, out=scratch)
    scratch *= rate
    if keep != 1:
        value *= keep
    value -= scratch


MOMENTS = """
    const T gradient = scale * grad;
    mean = beta1 * mean + (1 - beta1) * gradient;
    square = beta2 * square + (1 - beta2) * gradient * gradient;
"""
"""``update_moments`` in CUDA C."""

_KERNEL = Kernel(
    "adamw",
    ("rate", "keep", "scale", "beta1", "beta2", "eps"),
    reads=("grad",),
    writes=("value", "mean", "square"),
    host=_update,
    code=MOMENTS + "value = keep * value - rate * mean / (sqrt(square) + eps);",
)
