"""The order of samples: a function of the seed and the iteration alone, so that all ranks and runs agree, and
a run that goes on needs to know its iteration only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from payload.device import Array


@dataclass(frozen=True, slots=True)
class Slot:
    """One iteration's place in the data."""

    iteration: int  # from 1
    epoch: int  # from 1
    ends_epoch: bool
    indices: Array  # of the global batch's samples


class Order:
    """Each epoch walks all samples in an order of its own; the last batch of an epoch may be smaller."""

    def __init__(self, samples: int, batch_size: int, *, seed: int) -> None:
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self.per_epoch = -(-samples // batch_size)
        """Iterations in an epoch."""
        self._epoch, self._order = 0, np.empty(0, np.int64)

    def at(self, iteration: int) -> Slot:
        """What is due in an iteration, from 1."""
        epoch, place = divmod(iteration - 1, self.per_epoch)
        if epoch + 1 != self._epoch:
            self._epoch = epoch + 1
            self._order = np.random.default_rng((self._seed, self._epoch)).permutation(self._samples)
        start = place * self._batch_size
        indices = self._order[start : start + self._batch_size]
        return Slot(iteration, self._epoch, place + 1 == self.per_epoch, indices)


def shard(count: int, rank: int, size: int) -> slice:
    """One rank's share of ``count`` things: contiguous, no share more than one above another, some empty."""
    return slice(count * rank // size, count * (rank + 1) // size)
