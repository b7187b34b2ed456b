"""Trains on the digits with whole and with compressed gradients, from several seeds; prints the mean accuracy
and the bytes sent of each."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np

from payload.comm import mpi
from payload.comm.compression import make_compressor
from payload.config import COMPRESSORS
from payload.data.datasets import load_digits
from payload.data.images import Labelled
from payload.data.loader import local_slice
from payload.device import Array, Cpu
from payload.models import mlp
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import Options, make_mesh
from payload.parallel.pipeline import MicroBatch

EPOCHS, SEEDS, BATCH = int(sys.argv[1]), int(sys.argv[2]), 144

world = mpi.start()
device = Cpu()
training, held_out = load_digits()


def batch(samples: Labelled, indices: Array) -> list[MicroBatch]:
    """This rank's share."""
    mine = indices[local_slice(len(indices), world.rank, world.size)]
    images = samples.images[mine].astype("float32") / 8 - 1  # grey levels are 0 to 16
    return [MicroBatch(images, samples.labels[mine], mine.astype("uint32"))]


def train(seed: int, compression: str, **options: float) -> dict[str, float]:
    transport = mpi.MpiCommunicator(device)
    compressor = make_compressor(compression, transport, **options) if compression != "none" else None
    mesh = dataclasses.replace(make_mesh(transport), dp=compressor or transport)
    units = mlp.build(mesh.context(device), inputs=64, classes=10, hidden=(128, 64))
    engine = Engine(
        device,
        mesh,
        units,
        SoftmaxCrossEntropy(mesh.context(device)),
        lambda storage: SGD(storage.optimizer_device, storage.master_weights, storage.segments, momentum=0.9),
        options=Options(seed=seed),
        compressor=compressor,
    )
    before = transport.bytes_sent
    step = 0
    for epoch in range(EPOCHS):
        order = np.random.default_rng((seed, epoch)).permutation(len(training.labels))
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            step += 1
            engine.step(batch(training, indices), targets=len(indices), iteration=step, lr=0.1)
    sent = transport.bytes_sent - before
    found = engine.evaluate(batch(held_out, np.arange(len(held_out.labels))))
    values = world.allgather(engine.storage.master_weights.tobytes())
    assert all(theirs == values[0] for theirs in values)
    return {"accuracy": found.accuracy, "loss": found.loss, "bytes": sent / step}


def mean(compression: str, **options: float) -> dict[str, float]:
    runs = [train(seed, compression, **options) for seed in range(SEEDS)]
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


answer = {name: mean(name) for name in ("none", *COMPRESSORS)}  # as they are by default
answer["topk 0.1"] = mean("topk", ratio=0.1)
if world.rank == 0:
    sys.stdout.write(json.dumps(answer))
