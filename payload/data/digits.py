"""The UCI handwritten digits: 1,797 images of 8 by 8 pixels, shipped as numbers (README.md says whence)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from payload.data.images import Labelled

_HELD_OUT_EVERY = 5


def load() -> tuple[Labelled, Labelled]:
    """1,438 training samples and 359 held out: every fifth, whatever the seed, to keep runs comparable."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, labels = file["images"][..., None], file["labels"].astype(np.int64)
    held_out = np.arange(len(labels)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    return Labelled(images[~held_out], labels[~held_out]), Labelled(images[held_out], labels[held_out])
