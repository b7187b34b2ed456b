"""Formats of numbers, and the scale that keeps small gradients from vanishing in half precision.

In half precision layers compute with weights and activations of 16 bits, and sum products, norms,
probabilities and losses in float32. Masters, gradients and the optimizer's state are float32 (Micikevicius et
al., "Mixed Precision Training", ICLR 2018). bfloat16 has float32's range; float16 needs its loss scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Precision:
    """In what is computed, and in what is summed and updated."""

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
    """What the loss is multiplied by, so that its gradients fall into the range of the format.

    A dynamic one is halved when a gradient overflows, and the step left out; after ``interval`` steps without
    an overflow it is doubled. Interval and start are NVIDIA's (Apex) and PyTorch's.
    """

    value: float = 1.0
    dynamic: bool = False
    interval: int = 2000
    skipped: int = 0  # steps
    unbroken: int = 0  # steps since the value changed

    def overflowed(self) -> bool:
        """Gradients are not finite. Whether a lower scale may help: the step is to be skipped then."""
        if not self.dynamic or self.value <= 1:
            return False
        self.value /= 2
        self.skipped += 1
        self.unbroken = 0
        return True

    def held(self) -> None:
        """A step went well."""
        self.unbroken += 1
        if self.dynamic and self.unbroken == self.interval:
            self.value *= 2
            self.unbroken = 0

    @property
    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "skipped": self.skipped, "unbroken": self.unbroken}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from there; a scale that the user set stays as it is."""
        if self.dynamic:
            self.value, self.unbroken = state["value"], int(state["unbroken"])
        self.skipped = int(state["skipped"])


def loss_scale(precision: str, wanted: float | None) -> LossScale:
    """``wanted``: a fixed one; None: dynamic for fp16, and none for formats with the range of float32."""
    if wanted is not None:
        return LossScale(wanted)
    return LossScale(2.0**16, dynamic=True) if precision == "fp16" else LossScale()
