"""One file a model. A model knows nothing of ranks."""

from __future__ import annotations

from typing import Protocol

from payload.device import Array
from payload.nn.buffers import FlatBuffers


class Model(Protocol):
    """What training needs of a network."""

    buffers: FlatBuffers

    def forward(self, x: Array) -> Array:
        """Inputs (B, ...) → logits (B, classes)."""

    def backward(self, dlogits: Array) -> None:
        """Set all gradients from the loss's gradient by the logits, (B, classes)."""
