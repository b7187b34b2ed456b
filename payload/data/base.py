"""What training needs of a data set. Samples are made on the host; a rank asks only for its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from payload.device.base import Array
from payload.nn.module import Draw

Pair = tuple[Array, Array]
"""Inputs (B, ...) and targets (B,) or (B, T), whole numbers of which those below 0 do not count."""


class Dataset(Protocol):
    """Samples to train on, and others, held out, to judge by."""

    about: str
    """What it is, and what was left out of it, in a line."""
    training: int
    """Samples to train on."""
    held_out: int
    """Samples to judge by."""
    facts: Mapping[str, int]
    """Its sizes, by the names under which models ask for them."""
    data_state: Mapping[str, Any]
    """Of the training samples, for JSON: by it other data is read as the model knows it."""
    input: Mapping[str, Any]
    """What a sample is to a model, for JSON: its ``kind``, as models take it; of images their ``shape``
    (height, width, channels), and ``mean`` and ``scale`` of each channel, with which pixels from 0 to 255
    become (pixel - mean) · scale; of text its ``length`` in tokens, and the ``mask`` token, if any."""
    tokenizer: Mapping[str, Any] | None
    """Of text, for JSON: ``kind``, and what it has learned."""
    targets: float
    """In a training sample, as far as known beforehand."""
    bytes_per_target: float | None
    """Of held-out text, for bits per byte; None for what is no text."""

    def training_batch(self, indices: Array, epoch: int, draw: Draw) -> Pair:
        """Samples, varied by chance: the same for the same draw, whatever the layout."""

    def held_out_batch(self, indices: Array) -> Pair: ...
