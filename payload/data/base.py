"""The interface of data sets for training. Each rank creates only its own samples, in host
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from payload.device.base import Array
from payload.nn.module import RandomState

Pair = tuple[Array, Array]
"""Inputs (B, ...) and integer targets (B,) or (B, T). Targets below 0 are ignored."""


class Dataset(Protocol):
    """Samples for training, and held-out samples for evaluation."""

    about: str
    """A line for the user about the data and about omitted samples."""
    training: int
    """Number of training samples."""
    held_out: int
    """Number of held-out samples."""
    facts: Mapping[str, int]
    """Sizes of the data, by the names that models use, such as ``vocabulary``."""
    data_state: Mapping[str, Any]
    """State learned from the training samples, for JSON. Data for evaluation is read with the same
    state.
    """
    input: Mapping[str, Any]
    """Description of a model's input, for JSON, with its ``kind``. For images: the ``shape``
    (height, width, channels), and ``mean`` and ``scale`` per channel: pixels from 0 to 255 become
    (pixel - mean) · scale.
    For text: the ``length`` in tokens, and for masked text the number of the ``mask`` token."""
    tokenizer: Mapping[str, Any] | None
    """For text, for JSON: the tokenizer's ``kind`` and learned state."""
    targets: float
    """Expected number of targets in a training sample."""
    bytes_per_target: float | None
    """Bytes of held-out text per target, to compute bits per byte. None: not known, as for images.
    """

    def training_batch(self, indices: Array, epoch: int, draw: RandomState) -> Pair:
        """Return inputs and targets of samples. draw: seed of their random augmentation. epoch:
        from 1.
        """

    def held_out_batch(self, indices: Array) -> Pair: ...
