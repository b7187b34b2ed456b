"""Feeds this rank: its share of each global batch, in micro-batches on the device, made ahead by a thread.

The order of samples is a function of the seed and the iteration alone, so that all ranks and runs agree, and
a run that is resumed needs to know its iteration only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from payload.data.base import Dataset, Pair
from payload.device.base import Array, Device
from payload.nn.module import Draw
from payload.parallel.mesh import Mesh
from payload.parallel.pipeline import MicroBatch


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


def local_slice(count: int, rank: int, size: int) -> slice:
    """One rank's share of ``count`` things: contiguous, no share more than one above another, some empty."""
    return slice(count * rank // size, count * (rank + 1) // size)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Feed:
    """What one iteration trains on."""

    slot: Slot
    batches: list[MicroBatch]  # this rank's; the same number on all ranks
    targets: int  # in the global batch, as far as known beforehand


class Loader:
    """The order of samples is the same on any layout, and so is the chance in them."""

    def __init__(
        self,
        dataset: Dataset,
        device: Device,
        mesh: Mesh,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int,
        prefetch: int = 0,
        dtype: DTypeLike = "float32",
    ) -> None:
        """
        Args:
            micro_batch: samples that a rank works on at once; None: its whole share.
            prefetch: iterations for which a thread makes samples ahead.
            dtype: in which layers compute: inputs that are no whole numbers come so.
        """
        self._dataset, self._device, self._dp = dataset, device, mesh.dp
        self._seed, self._prefetch, self._dtype = seed, prefetch, dtype
        self._global_batch = global_batch
        largest = math.ceil(global_batch / mesh.dp.size)
        self._micro_batch = min(micro_batch or largest, largest)
        self.order = Order(dataset.training, global_batch, seed=seed)

    @property
    def micro_batches(self) -> int:
        """Into how many each rank cuts its share of a whole global batch."""
        return self._number(self._global_batch)

    def training(self, first: int, last: int) -> Iterator[Feed]:
        """The iterations from ``first`` to ``last``, from 1."""

        def make() -> Iterator[tuple[Slot, list[tuple[Pair, Array]]]]:
            for iteration in range(first, last + 1):
                slot = self.order.at(iteration)
                yield slot, [self._sample(slot, part) for part in self._parts(len(slot.indices))]

        for slot, parts in prefetched(make(), self._prefetch, self._device.use):
            batches = [self._on_device(pair, places) for pair, places in parts]
            yield Feed(slot, batches, max(1, round(len(slot.indices) * self._dataset.targets)))

    def held_out(self) -> Iterator[MicroBatch]:
        """This rank's share of all held-out samples; the same number of micro-batches on all ranks, each of
        which comes to the device when it is due."""
        for part in self._parts(self._dataset.held_out):
            pair = self._dataset.held_out_batch(np.arange(part.start, part.stop))
            yield self._on_device(pair, np.arange(part.start, part.stop, dtype="uint32"))

    def _parts(self, count: int) -> list[slice]:
        """This rank's micro-batches of a batch of so many samples; as many as the largest share needs."""
        mine = local_slice(count, self._dp.rank, self._dp.size)
        size = mine.stop - mine.start
        number = self._number(count)
        cuts = [local_slice(size, part, number) for part in range(number)]
        return [slice(mine.start + cut.start, mine.start + cut.stop) for cut in cuts]

    def _number(self, count: int) -> int:
        return math.ceil(math.ceil(count / self._dp.size) / self._micro_batch)

    def _sample(self, slot: Slot, part: slice) -> tuple[Pair, Array]:
        places = np.arange(part.start, part.stop, dtype="uint32")
        draw = Draw(self._seed, slot.iteration, places)
        inputs, targets = self._dataset.training_batch(slot.indices[part], slot.epoch, draw)
        return (self._device.pinned_copy(inputs), self._device.pinned_copy(targets)), places

    def _on_device(self, pair: Pair, places: Array) -> MicroBatch:
        inputs, targets = (self._device.upload(array) for array in pair)
        if inputs.dtype.kind == "f":
            inputs = inputs.astype(self._dtype, copy=False)
        return MicroBatch(inputs, targets, self._device.asarray(places))


def prefetched(items: Iterator[T], depth: int, begin: Callable[[], None] = lambda: None) -> Iterator[T]:
    """The same items, up to ``depth`` of them made ahead by a thread, which calls ``begin`` before each.

    An error in the thread is raised here, in its place among the items. The thread ends with the last item,
    or when this iterator is closed.
    """
    if not depth:
        yield from items
        return

    def take() -> list[T]:
        begin()
        return list(islice(items, 1))

    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = deque(thread.submit(take) for _ in range(depth))
        while taken := ahead.popleft().result():
            ahead.append(thread.submit(take))
            yield taken[0]
    finally:
        thread.shutdown(cancel_futures=True)
