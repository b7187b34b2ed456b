"""Number formats, and the loss scale that keeps small gradients from vanishing in half precision.

In half precision, layers use 16-bit weights and activations, and sum products, norms, probabilities
and losses in float32. Master weights, gradients and optimizer state are float32 (Micikevicius et
al., "Mixed Precision Training", ICLR 2018). bfloat16 has the range of float32; float16 needs loss
scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of layers (``compute``) and of sums and updates (``master``)."""

    compute: np.dtype[Any]
    master: np.dtype[Any]


PRECISIONS = {
    "fp64": Precision(np.dtype("float64"), np.dtype("float64")),
    "fp32": Precision(np.dtype("float32"), np.dtype("float32")),
    "bf16": Precision(np.dtype(ml_dtypes.bfloat16), np.dtype("float32")),
    "fp16": Precision(np.dtype("float16"), np.dtype("float32")),
}


@dataclass(slots=True)
class LossScale:
    """Factor on the loss that moves the gradients into the range of the format.

    When a gradient overflows, a dynamic factor is halved and the update skipped. After ``interval``
    steps without overflow, the factor is doubled. Interval and first value are those of NVIDIA's
    Apex and PyTorch.
    """

    value: float = 1.0
    dynamic: bool = False
    interval: int = 2000
    skipped: int = 0
    # Steps since the value changed.
    unbroken: int = 0

    def overflowed(self) -> bool:
        """After an overflow, halve a dynamic scale above 1 and return True. Otherwise, return
        False.
        """
        if not self.dynamic or self.value <= 1:
            return False
        self.value /= 2
        self.skipped += 1
        self.unbroken = 0
        return True

    def record_success(self) -> None:
        """Count a step without overflow. After ``interval`` such steps, double a dynamic scale."""
        self.unbroken += 1
        if self.dynamic and self.unbroken == self.interval:
            self.value *= 2
            self.unbroken = 0

    @property
    def state(self) -> dict[str, float]:
        """The scale and its counters by name, for a checkpoint."""
        return {"value": self.value, "skipped": self.skipped, "unbroken": self.unbroken}

    def restore(self, state: dict[str, float]) -> None:
        """Restore a saved state. A fixed scale stays as the user set it."""
        if self.dynamic:
            self.value = state["value"]
            self.unbroken = int(state["unbroken"])
        self.skipped = int(state["skipped"])


def loss_scale(precision: str, fixed: float | None) -> LossScale:
    """Return the user's ``fixed`` loss scale, or a dynamic scale for fp16, or 1 for other
    precisions.
    """
    if fixed is not None:
        return LossScale(fixed)
    return LossScale(2.0**16, dynamic=True) if precision == "fp16" else LossScale()
