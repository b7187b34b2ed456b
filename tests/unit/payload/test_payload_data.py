from __future__ import annotations

import numpy as np
import pytest

from payload.data.datasets import load_digits
from payload.data.loader import Order, local_slice


def test_digits_have_all_images_in_two_sets() -> None:
    training, held_out = load_digits()
    assert (training.images.shape, held_out.images.shape) == ((1438, 8, 8, 1), (359, 8, 8, 1))
    assert (training.images.min(), training.images.max()) == (0, 16)
    assert np.bincount(np.concatenate([training.labels, held_out.labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_epoch_has_each_sample_once() -> None:
    order = Order(103, 10, seed=3)
    epoch = [order.at(iteration) for iteration in range(12, 23)]
    assert [len(slot.indices) for slot in epoch] == [10] * 10 + [3]
    assert sorted(np.concatenate([slot.indices for slot in epoch]).tolist()) == list(range(103))
    assert [slot.epoch for slot in epoch] == [2] * 11
    assert [slot.ends_epoch for slot in epoch] == [False] * 10 + [True]


def test_order_depends_on_seed_and_iteration_alone() -> None:
    def first(seed: int, iteration: int) -> list[int]:
        return [int(index) for index in Order(103, 10, seed=seed).at(iteration).indices]

    walked = Order(103, 10, seed=0)
    for iteration in range(1, 15):
        assert walked.at(iteration).indices.tolist() == first(0, iteration)
    assert len({tuple(first(seed, iteration)) for seed in (0, 1) for iteration in (1, 12)}) == 4


@pytest.mark.parametrize(("count", "size"), [(10, 3), (2, 5), (0, 2), (64, 64)])
def test_shards_cover_everything_evenly(count: int, size: int) -> None:
    shards = [range(count)[local_slice(count, rank, size)] for rank in range(size)]
    assert [index for part in shards for index in part] == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
