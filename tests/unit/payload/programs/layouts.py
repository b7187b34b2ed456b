"""Trains small models in every layout of the table below, and prints what came of each as one JSON object.

mpirun -n 4 python layouts.py core      # or: all
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from payload.comm import mpi
from payload.device import Array, Device, choose
from payload.models import mlp
from payload.nn.activation import ReLU
from payload.nn.base import Context, Sequential, Unit
from payload.nn.linear import Linear
from payload.nn.loss import Loss, SoftmaxCrossEntropy
from payload.optim.sgd import SGD
from payload.parallel.build import assemble
from payload.parallel.mesh import Mesh, make_mesh
from payload.parallel.stage import Batch

ITERATIONS = 12
SAMPLES = 40
CLIP = 2.0
SIZES = (13, 13, 7, 2)
"""Of global batches, in turn: no layout divides them evenly, and to some ranks falls nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a layout; data-parallel over the ranks that are left."""

    model: str
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    bucket_bytes: int = 25 << 20

    def __str__(self) -> str:
        marks = [
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return " ".join([self.model, *marks[1:]])


SMALL_BUCKETS = 512  # a few of them in every model

CORE: dict[int, list[Case]] = {
    1: [Case("mlp", micro_batches=3)],
    2: [
        Case("mlp", micro_batches=2, bucket_bytes=SMALL_BUCKETS),
        Case("mlp", pp=2, micro_batches=5),
        Case("tied", pp=2, micro_batches=2),
    ],
    3: [
        Case("mlp", bucket_bytes=SMALL_BUCKETS),
        Case("tied", pp=3, micro_batches=4),
    ],
    4: [
        Case("mlp", pp=2, micro_batches=3, bucket_bytes=SMALL_BUCKETS),
        Case("mlp", pp=4, micro_batches=6),
        Case("tied", pp=2, micro_batches=1, bucket_bytes=SMALL_BUCKETS),
    ],
}


def every(ranks: int) -> Iterator[Case]:
    """The whole product, as far as it makes sense on so many ranks."""
    for model, pp, micro_batches, bucket_bytes in product(
        MODELS, (1, 2, 3, 4), (1, 2, 5), (SMALL_BUCKETS, 25 << 20)
    ):
        if ranks % pp == 0:
            yield Case(model, pp=pp, micro_batches=micro_batches, bucket_bytes=bucket_bytes)


def build(model: str, context: Context) -> tuple[Sequence[Unit], Loss]:
    return MODELS[model](context), SoftmaxCrossEntropy(context)


def _tied(context: Context) -> list[Unit]:
    """The same layer in the first and the last unit."""
    shared = Linear(context, "shared", 12, 12)
    between = [
        Unit(f"linear{i}", Sequential(Linear(context, f"linear{i}", 12, 12), ReLU())) for i in range(3)
    ]
    return [Unit("first", Sequential(shared, ReLU())), *between, Unit("last", shared)]


MODELS: dict[str, Callable[[Context], list[Unit]]] = {
    "mlp": partial(mlp.build, inputs=12, classes=5, hidden=(16, 15, 14)),
    "tied": _tied,
}


def data(model: str) -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((SAMPLES, 12)).astype("float32"), rng.integers(0, 5, SAMPLES)


def train(case: Case, mesh: Mesh, device: Device) -> dict[str, Any]:
    units, loss = build(case.model, mesh.context(device))
    engine = assemble(
        device,
        mesh,
        units,
        loss,
        lambda storage: SGD(storage.home, storage.values, storage.segments, momentum=0.9),
        seed=5,
        clip=CLIP,
        bucket_bytes=case.bucket_bytes,
    )
    inputs, targets = (device.asarray(array) for array in data(case.model))

    def share(indices: Array) -> list[Batch]:
        bounds = [len(indices) * rank // mesh.dp.size for rank in range(mesh.dp.size + 1)]
        places = np.arange(*bounds[mesh.dp.rank : mesh.dp.rank + 2])
        mine = device.asarray(indices[places])
        return Batch(inputs[mine], targets[mine], device.asarray(places.astype("uint32"))).cut(
            case.micro_batches
        )

    order = np.random.default_rng(4)
    losses, norms = [], []
    for iteration in range(1, ITERATIONS + 1):
        chosen = order.permutation(SAMPLES)[: SIZES[iteration % len(SIZES)]]
        outcome = engine.step(
            share(chosen), targets=targets[device.asarray(chosen)].size, iteration=iteration, lr=0.1
        )
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    evaluation = engine.evaluate(share(np.arange(SAMPLES)))
    return {"losses": losses, "norms": norms, "evaluation": [evaluation.loss, evaluation.accuracy]}


def main() -> None:
    world = mpi.start()
    device = choose("auto", mpi.local_rank())
    world = mpi.MpiCommunicator(device)
    cases = CORE[world.size] if sys.argv[1] == "core" else every(world.size)
    answers = {str(case): train(case, make_mesh(world, tp=case.tp, pp=case.pp), device) for case in cases}
    if world.rank == 0:
        sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
