"""Samples that are copied to the GPU beside the computation, on doubles of streams.

Work of a side stream runs there as late as possible, so that whoever forgets to wait reads old
numbers. With a GPU the copies are also made by it.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from payload.comm.base import Solo
from payload.data.datasets import open_dataset
from payload.data.loader import IterationBatches, Loader
from payload.device.base import CpuDevice, Device
from payload.parallel.mesh import alone
from tests.support.doubles.capture import Capturing, Stream
from tests.support.payload import train_config

pytestmark = pytest.mark.platform("stand-in", "cuda")


def test_uploaded_array_is_complete_when_received() -> None:
    device = Capturing()
    host = np.arange(1, 7, dtype="float32").reshape(2, 3)
    upload = device.upload(host)
    upload.array[...] = 0
    assert device.receive(upload).get().tolist() == host.tolist()


def test_upload_begins_after_earlier_work_that_may_use_its_memory() -> None:
    device = Capturing()
    log: list[str] = []
    with Stream() as computing:
        computing.put(lambda: log.append("earlier"))
        upload = device.upload(np.ones(3))
    assert log == []
    device.receive(upload)
    assert log == ["earlier"]


def test_memory_of_an_upload_is_kept_until_it_is_copied() -> None:
    """Nobody may hold it: a run that ends drops the batches that were prepared in advance."""
    device = Capturing()
    host = np.ones(3)
    upload = device.upload(host)
    array = upload.array
    alive = weakref.ref(host), weakref.ref(array)
    del host, upload, array
    device.upload(np.ones(3))
    gc.collect()
    assert all(one() is not None for one in alive)
    device._uploads._stream.synchronize()
    device.upload(np.ones(3))
    gc.collect()
    assert all(one() is None for one in alive)


def _feeds(device: Device, prefetch: int) -> list[IterationBatches]:
    dataset = open_dataset(train_config("--augment", "crop"), Solo())
    loader = Loader(
        dataset, device, alone(), global_batch=10, micro_batch=4, seed=1, prefetch=prefetch
    )
    return list(loader.training(1, 4))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_loaded_batches_are_those_of_a_cpu(prefetch: int, real_device: Device) -> None:
    devices = [Capturing(), *([real_device] if real_device.gpu else [])]
    for device in devices:
        for ours, theirs in zip(_feeds(device, prefetch), _feeds(CpuDevice(), 0), strict=True):
            assert (ours.targets, len(ours.batches)) == (theirs.targets, 3)
            for one, other in zip(ours.batches, theirs.batches, strict=True):
                for name in ("inputs", "targets", "samples"):
                    found = device.to_host(getattr(one, name))
                    np.testing.assert_array_equal(found, getattr(other, name))
