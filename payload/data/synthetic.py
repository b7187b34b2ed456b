"""Noise in the shape of data, to measure speed with: nothing can be learned of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from payload.data.images import facts
from payload.data.source import Pair
from payload.device import Array
from payload.nn.tape import Draw

_SAMPLES, _HELD_OUT = 65_536, 64
_POOL = 64  # samples that are really there, in turn: making noise would cost more than many a model


class Synthetic:
    """As ``Source``."""

    training, held_out = _SAMPLES, _HELD_OUT
    bytes_per_target = None
    learned: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, about: str, inputs: Array, targets: Array, sizes: Mapping[str, int]) -> None:
        self.about = f"synthetic {about}"
        self.facts = sizes
        self.targets = float(np.prod(targets.shape[1:]))
        self._inputs, self._targets = inputs, targets

    def training_batch(self, indices: Array, epoch: int, draw: Draw) -> Pair:  # noqa: ARG002
        return self.held_out_batch(indices)

    def held_out_batch(self, indices: Array) -> Pair:
        return self._inputs[indices % _POOL], self._targets[indices % _POOL]


def images(side: int, channels: int, classes: int, *, dtype: str) -> Synthetic:
    """(B, side, side, channels)"""
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((_POOL, side, side, channels), dtype)  # type: ignore[call-overload]
    about = f"images of {side}x{side}x{channels}, {classes} classes"
    return Synthetic(about, pixels, rng.integers(classes, size=_POOL), facts(side, side, channels, classes))


def tokens(vocabulary: int, length: int) -> Synthetic:
    """(B, length)"""
    rng = np.random.default_rng(0)
    sizes = {"vocabulary": vocabulary, "classes": vocabulary, "length": length, "tokens": length}
    drawn = rng.integers(vocabulary, size=(2, _POOL, length))
    return Synthetic(f"tokens, {length} a sample, of {vocabulary}", drawn[0], drawn[1], sizes)
