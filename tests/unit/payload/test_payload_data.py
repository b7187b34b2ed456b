from __future__ import annotations

import numpy as np
import pytest

from payload.data import digits
from payload.data.order import batches, shard


def test_digits_are_whole_and_split_once() -> None:
    training, held_out = digits.load()
    assert (training.x.shape, held_out.x.shape) == ((1438, 64), (359, 64))
    assert training.x.min() == -1
    assert training.x.max() == 1
    assert np.bincount(np.concatenate([training.labels, held_out.labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_an_epoch_has_each_sample_once() -> None:
    epoch = list(batches(103, 10, seed=3, epoch=1))
    assert [len(batch) for batch in epoch] == [10] * 10 + [3]
    assert sorted(np.concatenate(epoch).tolist()) == list(range(103))


def test_order_depends_on_seed_and_epoch() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return [int(index) for index in next(batches(103, 10, seed=seed, epoch=epoch))]

    assert first(0, 1) == first(0, 1)
    assert len({tuple(first(seed, epoch)) for seed in (0, 1) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize(("count", "size"), [(10, 3), (2, 5), (0, 2), (64, 64)])
def test_shards_cover_everything_evenly(count: int, size: int) -> None:
    shards = [range(count)[shard(count, rank, size)] for rank in range(size)]
    assert [index for part in shards for index in part] == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
