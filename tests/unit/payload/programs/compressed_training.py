"""Trains on the digits with whole and with compressed gradients; prints accuracy and bytes sent of each."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np

from payload.comm import mpi
from payload.comm.choose import COMPRESSORS, compress
from payload.data import digits
from payload.data.order import batches, shard
from payload.device import Cpu
from payload.models import mlp
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim.sgd import SGD
from payload.parallel.build import assemble
from payload.parallel.mesh import make_mesh
from payload.parallel.stage import Batch

EPOCHS, BATCH = int(sys.argv[1]), 144

world = mpi.start()
device = Cpu()
training, held_out = (split.on(device, "float32") for split in digits.load())


def batch(split: digits.Split, indices: np.ndarray) -> list[Batch]:
    mine = indices[shard(len(indices), world.rank, world.size)]
    return [Batch(split.x[mine], split.labels[mine], mine.astype("uint32"))]


def train(compression: str) -> dict[str, float]:
    transport = mpi.MpiCommunicator(device)
    options = {"topk": {"ratio": 0.1}, "powersgd": {"rank": 4}}.get(compression, {})
    compressor = compress(compression, transport, **options) if compression != "none" else None
    mesh = dataclasses.replace(make_mesh(transport), dp=compressor or transport)
    units = mlp.build(mesh.context(device), inputs=digits.PIXELS, classes=digits.CLASSES, hidden=(128, 64))
    engine = assemble(
        device,
        mesh,
        units,
        SoftmaxCrossEntropy(mesh.context(device)),
        lambda storage: SGD(storage.home, storage.values, storage.segments, momentum=0.9),
        seed=0,
        bucket_bytes=1 << 15,
        compressor=compressor,
    )
    before = transport.bytes_sent
    step = 0
    for epoch in range(1, EPOCHS + 1):
        for indices in batches(len(training.labels), BATCH, seed=0, epoch=epoch):
            step += 1
            engine.step(batch(training, indices), targets=len(indices), iteration=step, lr=0.1)
    sent = transport.bytes_sent - before
    found = engine.evaluate(batch(held_out, np.arange(len(held_out.labels))))
    values = world.allgather(engine.storage.values.tobytes())
    assert all(theirs == values[0] for theirs in values)
    return {"accuracy": found.accuracy, "loss": found.loss, "bytes": sent / step}


answer = {name: train(name) for name in ("none", *COMPRESSORS)}
if world.rank == 0:
    sys.stdout.write(json.dumps(answer))
