"""The loader of training samples: a rank's share of each global batch, as micro-batches on the
device.

A thread prepares the samples in advance, and copies them to the device beside the computation. The
order of samples depends only on the seed and the iteration, so all ranks use the same order, and a
resumed run needs only its iteration to find the next samples.
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

from payload.data.base import Dataset
from payload.device.base import Array, Device, PendingUpload
from payload.nn.module import RandomState
from payload.node.heartbeat import beat
from payload.parallel.mesh import Mesh
from payload.parallel.pipeline import MicroBatch


@dataclass(frozen=True, slots=True)
class IterationSamples:
    """The samples of an iteration, as indices into the data set."""

    iteration: int  # from 1
    epoch: int  # from 1
    ends_epoch: bool
    indices: Array  # [global batch]


class Order:
    """The order of samples: a new random permutation in each epoch. An epoch's last batch may be
    smaller.
    """

    def __init__(self, samples: int, batch_size: int, *, seed: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed
        self.per_epoch = -(-samples // batch_size)
        """Iterations in an epoch."""
        self._epoch = 0
        self._order = np.empty(0, np.int64)

    def at(self, iteration: int) -> IterationSamples:
        epoch, position = divmod(iteration - 1, self.per_epoch)
        if epoch + 1 != self._epoch:
            self._epoch = epoch + 1
            self._order = np.random.default_rng((self._seed, self._epoch)).permutation(
                self._samples
            )
        start = position * self._batch_size
        indices = self._order[start : start + self._batch_size]
        return IterationSamples(iteration, self._epoch, position + 1 == self.per_epoch, indices)


def local_slice(count: int, rank: int, size: int) -> slice:
    """Return a rank's contiguous share of ``count`` items. The sizes of shares differ by at most
    1.
    """
    return slice(count * rank // size, count * (rank + 1) // size)


T = TypeVar("T")


# Inputs, targets and positions of the samples of a micro-batch.
_Uploads = tuple[PendingUpload, ...]


@dataclass(frozen=True, slots=True)
class IterationBatches:
    """This rank's micro-batches of an iteration. All ranks have the same number of
    micro-batches.
    """

    slot: IterationSamples
    batches: list[MicroBatch]
    # Expected number of targets in the global batch.
    targets: int


class Loader:
    """Loads batches. Neither the order of samples nor their augmentation depends on the layout of
    ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: Device,
        mesh: Mesh,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int,
        eval_samples: int | None = None,
        prefetch: int = 0,
        dtype: DTypeLike = "float32",
    ) -> None:
        """
        Args:
            micro_batch: number of samples that a rank processes at once. Default: its whole share.
            eval_samples: largest number of held-out samples, spread evenly over all. Default: all.
            prefetch: number of iterations that a thread prepares in advance.
            dtype: dtype of floating-point inputs.
        """
        self._dataset = dataset
        self._device = device
        self._dp = mesh.dp
        self._seed = seed
        self._prefetch = prefetch
        self._dtype = dtype
        self._global_batch = global_batch
        self._held_out = min(eval_samples or dataset.held_out, dataset.held_out)
        largest = math.ceil(global_batch / mesh.dp.size)
        self._micro_batch = min(micro_batch or largest, largest)
        self.order = Order(dataset.training, global_batch, seed=seed)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per rank in a full global batch."""
        return self._number(self._global_batch)

    def training(self, first: int, last: int) -> Iterator[IterationBatches]:
        """Yield this rank's micro-batches of each iteration from ``first`` to ``last``, counted
        from 1.
        """

        def make() -> Iterator[tuple[IterationSamples, list[_Uploads]]]:
            for iteration in range(first, last + 1):
                slot = self.order.at(iteration)
                yield slot, [self._sample(slot, part) for part in self._parts(len(slot.indices))]

        for slot, parts in prefetched(make(), self._prefetch, self._device.use):
            batches = [self._received(part) for part in parts]
            yield IterationBatches(
                slot, batches, max(1, round(len(slot.indices) * self._dataset.targets))
            )

    def held_out(self) -> Iterator[MicroBatch]:
        """Yield this rank's share of held-out samples, in as many micro-batches as on every other
        rank.
        """
        for part in self._parts(self._held_out):
            indices = np.arange(part.start, part.stop) * self._dataset.held_out // self._held_out
            pair = self._dataset.held_out_batch(indices)
            yield self._received(self._upload(*pair, indices.astype("uint32")))

    def _parts(self, count: int) -> list[slice]:
        """Return this rank's micro-batches of ``count`` samples, as slices. All ranks have equally
        many.
        """
        share = local_slice(count, self._dp.rank, self._dp.size)
        size = share.stop - share.start
        number = self._number(count)
        cuts = [local_slice(size, part, number) for part in range(number)]
        return [slice(share.start + cut.start, share.start + cut.stop) for cut in cuts]

    def _number(self, count: int) -> int:
        return math.ceil(math.ceil(count / self._dp.size) / self._micro_batch)

    def _sample(self, slot: IterationSamples, part: slice) -> _Uploads:
        sample_ids = np.arange(part.start, part.stop, dtype="uint32")
        draw = RandomState(self._seed, slot.iteration, sample_ids)
        inputs, targets = self._dataset.training_batch(slot.indices[part], slot.epoch, draw)
        return self._upload(inputs, targets, sample_ids)

    def _upload(self, *arrays: Array) -> _Uploads:
        return tuple(self._device.upload(self._device.pinned_copy(array)) for array in arrays)

    def _received(self, uploads: _Uploads) -> MicroBatch:
        beat()
        inputs, targets, samples = map(self._device.receive, uploads)
        if inputs.dtype.kind == "f":
            inputs = inputs.astype(self._dtype, copy=False)
        return MicroBatch(inputs, targets, samples)


def prefetched(
    items: Iterator[T], depth: int, begin: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """Yield the items. A thread prepares up to ``depth`` items in advance.

    begin: called in the thread before each item. If ``begin`` or ``items`` raises an error, this
        iterator raises the error in place of the item.

    The thread ends after the last item, or when this iterator is closed.
    """
    if not depth:
        yield from items
        return

    def take() -> list[T]:
        begin()
        return list(islice(items, 1))

    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        futures = deque(thread.submit(take) for _ in range(depth))
        while batch := futures.popleft().result():
            futures.append(thread.submit(take))
            yield batch[0]
    finally:
        thread.shutdown(cancel_futures=True)
