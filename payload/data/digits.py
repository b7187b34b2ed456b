"""The UCI handwritten digits: 1,797 images of 8 by 8 pixels, shipped as numbers (README.md says whence)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from payload.device import Array, Device

PIXELS = 64
CLASSES = 10
_HELD_OUT_EVERY = 5


@dataclass(frozen=True, slots=True)
class Split:
    """Samples of one kind, training or held-out."""

    x: Array  # (samples, 64), float64 in [-1, 1]
    labels: Array  # (samples,), whole numbers 0 to 9

    def on(self, device: Device, dtype: str) -> Split:
        """The same on a device, pixels as ``dtype``."""
        return Split(device.asarray(self.x, dtype), device.asarray(self.labels))


def load() -> tuple[Split, Split]:
    """1,438 training samples and 359 held out: every fifth, whatever the seed, to keep runs comparable."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    x = images.reshape(-1, PIXELS) / 8.0 - 1.0  # grey levels are 0 to 16
    held_out = np.arange(len(labels)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    return Split(x[~held_out], labels[~held_out]), Split(x[held_out], labels[held_out])
