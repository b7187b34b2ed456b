"""Feeds of 1, 2 and 4 data-parallel ranks put together: the same samples, places, chance and
epochs.
"""

import sys

import numpy as np

from payload.cli.arguments import parse
from payload.cli.config import TrainConfig
from payload.comm import mpi
from payload.comm.base import Solo
from payload.data.base import Dataset
from payload.data.datasets import open_dataset
from payload.data.loader import IterationBatches, Loader
from payload.device.base import Array, CpuDevice
from payload.parallel.mesh import alone, make_mesh

GLOBAL = 22  # neither divided by 4 ranks nor by micro-batches of 3

world = mpi.start()
tensor_parallel = make_mesh(mpi.MpiCommunicator(CpuDevice()), tp=2)
data_parallel = make_mesh(mpi.MpiCommunicator(CpuDevice()))


def source(*flags: str) -> Dataset:
    config = parse(["train", *flags])
    assert isinstance(config, TrainConfig)
    return open_dataset(config, Solo())


def whole(feed: IterationBatches) -> list[Array]:
    return [
        np.concatenate([getattr(batch, name) for batch in feed.batches])
        for name in ("inputs", "targets", "samples")
    ]


for given in (
    source("--augment", "crop,flip"),
    source("--data", f"text:{sys.argv[1]}", "--model", "bert-tiny", "--sequence-length", "8"),
):
    single = Loader(given, CpuDevice(), alone(), global_batch=GLOBAL, seed=1)
    first = single.order.per_epoch - 1  # over the end of an epoch
    expected = list(single.training(first, first + 3))
    judged = np.concatenate([batch.inputs for batch in single.held_out()])
    for mesh in (tensor_parallel, data_parallel):
        loader = Loader(
            given, CpuDevice(), mesh, global_batch=GLOBAL, micro_batch=3, seed=1, prefetch=2
        )
        feeds = list(loader.training(first, first + 3))
        assert [feed.slot.epoch for feed in feeds] == [1, 1, 2, 2]
        for feed, alike in zip(feeds, expected, strict=True):
            assert feed.targets == alike.targets
            assert len(set(mesh.dp.allgather(len(feed.batches)))) == 1
            assert all(len(batch.samples) <= 3 for batch in feed.batches)
            shares = mesh.dp.allgather(whole(feed))
            for mine, whole_batch in zip(zip(*shares, strict=True), whole(alike), strict=True):
                np.testing.assert_array_equal(np.concatenate(mine), whole_batch)
        parts = mesh.dp.allgather(np.concatenate([batch.inputs for batch in loader.held_out()]))
        np.testing.assert_array_equal(np.concatenate(parts), judged)
