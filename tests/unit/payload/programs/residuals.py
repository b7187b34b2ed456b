"""Trainings with compressed sums of gradients go on to the bit: with what each rank held back."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from payload.checkpoint.folder import prepare
from payload.checkpoint.saver import Saver
from payload.checkpoint.session import choose as choose_checkpoint
from payload.checkpoint.session import resume
from payload.checkpoint.shards import Manifest
from payload.comm import mpi
from payload.comm.compression import make_compressor
from payload.config import COMPRESSORS
from payload.device import choose
from payload.models import mlp
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import make_mesh
from payload.parallel.pipeline import MicroBatch

device = choose("auto", 0)
mpi.start()
world = mpi.MpiCommunicator(device)


def make_engine(name: str) -> Engine:
    compressor = make_compressor(name, world)
    mesh = replace(make_mesh(world), dp=compressor)
    context = mesh.context(device)
    return Engine(
        device,
        mesh,
        mlp.build(context, inputs=12, classes=3, hidden=(16,)),
        SoftmaxCrossEntropy(context),
        lambda storage: SGD(storage.optimizer_device, storage.master_weights, storage.segments, momentum=0.9),
        compressor=compressor,
    )


def step(engine: Engine, iteration: int) -> None:
    rng = np.random.default_rng((iteration, world.rank))
    x, labels = rng.standard_normal((4, 12)).astype("float32"), rng.integers(0, 3, 4)
    batch = MicroBatch(*(device.asarray(array) for array in (x, labels, np.arange(4, dtype="uint32"))))
    engine.step([batch], targets=4 * world.size, iteration=iteration, lr=0.1)


def describe(iteration: int) -> Manifest:
    return Manifest(iteration, {"dp": world.size}, {}, {}, {}, [])


for name in COMPRESSORS:
    folder = Path(sys.argv[1]) / name
    whole, parted = make_engine(name), make_engine(name)
    prepare(folder, world)
    for iteration in (1, 2, 3):
        step(whole, iteration)
    with Saver(whole, folder, describe, lambda **_: None, interval=1, keep=1, wait=True) as saver:
        saver.after(3, 0)
    assert resume(choose_checkpoint("auto", folder, world), parted, describe(0)).iteration == 3
    residual = device.to_host(parted.own_state["residual"]).tolist()
    assert any(residual), f"{name}: nothing was held back"
    assert world.allgather(residual)[0] != world.allgather(residual)[1], "ranks hold back the same"
    for iteration in (4, 5):
        step(whole, iteration)
        step(parted, iteration)
    for mine, theirs in (
        (whole.storage.master_weights, parted.storage.master_weights),
        *((whole.own_state[key], parted.own_state[key]) for key in whole.own_state),
    ):
        np.testing.assert_array_equal(device.to_host(mine).copy(), device.to_host(theirs))
