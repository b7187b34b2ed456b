"""Micro-batches for tests that bring their own data."""

from __future__ import annotations

from payload.data.loader import shard
from payload.parallel.pipeline import Batch


def cut(batch: Batch, pieces: int) -> list[Batch]:
    """A batch in micro-batches of nearly the same size, some of them empty if there are fewer samples."""
    parts = [shard(len(batch.samples), piece, pieces) for piece in range(pieces)]
    return [Batch(batch.inputs[part], batch.targets[part], batch.samples[part]) for part in parts]
