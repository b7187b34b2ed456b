"""A disk that fills while a checkpoint is written."""

from __future__ import annotations

import errno
import os

import pytest

from payload.checkpoint.folder import complete, prepare
from payload.checkpoint.shards import (
    read_manifest,
    verify,
)
from payload.device.base import Device
from payload.errors import PayloadError
from tests.support.disks import small_disk
from tests.support.messages import refused
from tests.unit.payload.test_payload_checkpoint import (
    describe,
    go_on,
    make_engine,
    numbers,
    saver_of,
    step,
)


# A page: for one file.
@pytest.mark.parametrize(("room", "wait"), [(0, True), (4096, True), (4096, False)])
def test_full_disk_loses_only_the_checkpoint_being_written(
    real_device: Device, room: int, wait: bool
) -> None:
    with small_disk() as disk:
        folder = disk.path / "checkpoints"
        engine = make_engine(real_device)
        prepare(folder, engine.mesh.world)
        with saver_of(engine, folder, wait=wait) as saver:
            step(engine, 1)
            saver.after(1, 0)
        saved = numbers(engine)
        disk.fill(but=room)
        engine.storage.master_weights[...] = 0

        def save_more() -> None:
            with saver_of(engine, folder, wait=wait) as saver:
                for iteration in range(2, 9):
                    saver.after(iteration, 0)

        with refused("checkpoint-unwritable", PayloadError, os.strerror(errno.ENOSPC)):
            save_more()
        kept = sorted(complete(folder))
        assert {path.name for path in folder.iterdir()} == {f"iteration-{n:08}" for n in kept}
        for each in complete(folder).values():
            for facts in read_manifest(each).files:
                verify(each, facts)
        if kept == [1]:
            other = make_engine(real_device, seed=1)
            assert go_on("auto", folder, other, describe(0)).iteration == 1
            assert numbers(other) == saved
