"""Passes one state from layout to layout through checkpoints: each loads what another saved, to the
number.

mpirun -n 4 python elastic.py FOLDER
"""

import math
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from payload.checkpoint.folder import prepare
from payload.checkpoint.saver import Saver
from payload.checkpoint.session import choose as choose_checkpoint
from payload.checkpoint.session import resume
from payload.checkpoint.shards import (
    CheckpointManifest,
    CheckpointReader,
    Shard,
    held_shards,
    read_manifest,
    saved_shards,
    scalars,
)
from payload.cli.report import ResultWriter
from payload.comm import mpi
from payload.device import choose
from payload.device.base import Array
from payload.models import gpt
from payload.nn.module import LayerContext, Unit
from payload.nn.norm import BatchNorm
from payload.optim.adamw import AdamW
from payload.parallel.engine import Engine
from payload.parallel.mesh import Mesh, make_mesh
from tests.support.doubles.layers import engine_of

CHAIN: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (1, {}, {}),
    (3, {}, {}),
    (2, {}, {"zero": 2}),
    (3, {}, {"zero": 3}),
    (4, {"tp": 2}, {"zero": 3, "offload": True}),
    (4, {"tp": 2, "pp": 2}, {}),
    (4, {"pp": 2}, {"zero": 1}),
    (1, {}, {}),
]
"""The first so many ranks of the job, their mesh, and options."""

UPDATES = 7
device = choose("auto", 0)
mpi.start()
world = mpi.MpiCommunicator(device)


def make_engine(mesh: Mesh, **options: Any) -> Engine:
    context = mesh.context(device)
    units = gpt.build(context, vocabulary=6, length=3, layers=2, heads=2, width=4)
    normed = Unit("normed", BatchNorm(LayerContext(device, dp=mesh.dp), "normed", 5))
    return engine_of(device, mesh, [*units, normed], AdamW, bucket_bytes=64, **options)


def expected(shard: Shard) -> Array:
    """Numbers that tell where in which tensor they belong."""
    first = zlib.crc32(shard.tensor.encode()) % 10**6
    whole = np.arange(first, first + math.prod(shard.shape), dtype="float32").reshape(shard.shape)
    part = (
        whole if shard.axis is None else np.split(whole, shard.parts, axis=shard.axis)[shard.part]
    )
    return part.reshape(-1)[shard.start : shard.stop]


def pass_on(folder: Path, number: int, mesh: Mesh, **options: Any) -> None:
    engine = make_engine(mesh, **options)
    now = CheckpointManifest(number, {"number": number}, {}, {}, {}, [])
    prepare(folder, mesh.world)
    resumed = resume(choose_checkpoint("auto", folder, mesh.world), engine, now)
    assert resumed.iteration == number - 1
    if number == 1:
        for shard, array in held_shards(engine):
            array[...] = (
                expected(shard)
                if engine.storage.optimizer_device is not device
                else device.asarray(expected(shard))
            )
        engine.optimizer.updates = UPDATES
    for shard, array in held_shards(engine):
        host = array if isinstance(array, np.ndarray) else device.to_host(array)  # or offloaded
        np.testing.assert_array_equal(host, expected(shard), str(shard))
    assert scalars(engine)["updates"] == UPDATES
    kinds = {shard.kind for shard, _ in held_shards(engine)}
    assert kinds <= {"weight", "optimizer.mean", "optimizer.square", "state"}
    report = ResultWriter(mesh.world, folder.parent / "elastic.jsonl")
    with Saver(engine, folder, now, report, interval=1, keep=1, wait=True) as saver:
        saver.after(number, 0)
    each_once(engine, mesh)
    path = folder / f"iteration-{number:08}"
    reader = CheckpointReader(path, read_manifest(path))
    for segment in engine.storage.segments:
        tensor = reader.whole("weight", segment.parameter.name)
        whole = Shard("weight", segment.parameter.name, tensor.shape, 0, tensor.size)
        np.testing.assert_array_equal(tensor.reshape(-1), expected(whole))


def each_once(engine: Engine, mesh: Mesh) -> None:
    """All that ranks hold is saved, and no number twice."""
    saved = sorted(
        (shard.tensor, shard.part, shard.start, shard.stop)
        for shards in mesh.world.allgather([shard for shard, _ in saved_shards(engine)])
        for shard in shards
    )
    for before, after in pairwise(saved):
        assert before[:2] != after[:2] or before[3] == after[2], (before, after)


for number, (ranks, shape, options) in enumerate(CHAIN, start=1):
    group = world.split(int(world.rank < ranks), world.rank)
    if world.rank < ranks:
        pass_on(Path(sys.argv[1]), number, make_mesh(group, **shape), **options)
    world.barrier()
