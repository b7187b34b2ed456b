"""The order of samples: a function of the seed and the epoch alone, so that all ranks and runs agree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from payload.device import Array


def batches(samples: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[Array]:
    """Indices of one epoch's global batches, each sample once; the last batch may be smaller."""
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    for start in range(0, samples, batch_size):
        yield order[start : start + batch_size]


def shard(count: int, rank: int, size: int) -> slice:
    """One rank's share of ``count`` things: contiguous, no share more than one above another, some empty."""
    return slice(count * rank // size, count * (rank + 1) // size)
