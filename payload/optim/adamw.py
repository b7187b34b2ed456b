"""Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from payload.device.base import Array, Device, Kernel
from payload.nn.module import Segment
from payload.optim.base import runs


class AdamW:
    """m ← β1·m + (1 - β1)·grad; v ← β2·v + (1 - β2)·grad²; and with m̂ and v̂, m and v put right for their
    start from 0 (that paper's algorithm 2), value ← value - lr·decay·value - lr·m̂ / (√v̂ + ε)."""

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
        self._device, self._moments = device, Moments(device, weights, beta1, beta2, eps)
        self._runs = runs(segments, weight_decay)
        self.updates = 0
        self.state = self._moments.state

    def step(self, weights: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        self.updates += 1
        given = self._moments.scalars(lr, scale, self.updates)
        mean, square = self.state["mean"], self.state["square"]
        for run, decay in self._runs:
            scalars = {**given, "keep": 1 - lr * decay}
            self._device.apply(_KERNEL, scalars, grads[run], weights[run], mean[run], square[run])


class Moments:
    """What Adam and its relatives remember of the gradients."""

    def __init__(self, device: Device, weights: Array, beta1: float, beta2: float, eps: float) -> None:
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        self.state: dict[str, Array] = {
            "mean": device.xp.zeros_like(weights),
            "square": device.xp.zeros_like(weights),
        }

    def scalars(self, lr: float, scale: float, updates: int) -> dict[str, float]:
        """Those of the kernels; with ``rate`` and ``eps``, rate·m / (√v + ε) is lr·m̂ / (√v̂ + ε)."""
        first, second = 1 - self._beta1**updates, 1 - self._beta2**updates
        root = math.sqrt(second)
        rate, eps = lr * root / first, self._eps * root
        return {"rate": rate, "eps": eps, "scale": scale, "beta1": self._beta1, "beta2": self._beta2}


def remember(grad: Array, mean: Array, square: Array, *, scale: float, beta1: float, beta2: float) -> Array:
    """Update blocks of the moments by the gradient. Gives a block of scratch memory to go on in."""
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
    scratch = remember(grad, mean, square, **moments)
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
"""``remember`` in CUDA C."""

_KERNEL = Kernel(
    "adamw",
    ("rate", "keep", "scale", "beta1", "beta2", "eps"),
    reads=("grad",),
    writes=("value", "mean", "square"),
    host=_update,
    code=MOMENTS + "value = keep * value - rate * mean / (sqrt(square) + eps);",
)
