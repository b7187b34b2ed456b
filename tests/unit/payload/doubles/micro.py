"""Micro-batches for tests that bring their own data."""

from __future__ import annotations

from payload.data.loader import local_slice
from payload.parallel.pipeline import MicroBatch


def cut(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """A batch in micro-batches of nearly the same size, some of them empty if there are fewer samples."""
    parts = [local_slice(len(batch.samples), piece, pieces) for piece in range(pieces)]
    return [MicroBatch(batch.inputs[part], batch.targets[part], batch.samples[part]) for part in parts]
