"""Trains small models in layouts of the table below, and prints what came of each as one JSON
object.

mpirun -n 4 python layouts.py core 3           3 iterations; or the name of a model, for all of its layouts
mpirun -n 4 python layouts.py core 3 double    the same over the double of CuPy
mpirun -n 2 python layouts.py nccl 3 double    sums by NCCL or its double; each rank needs its own GPU
mpirun -n 2 python layouts.py fused 3 double   in bf16, by cuDNN and cuBLASLt or their doubles
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import numpy as np

from payload.comm import mpi
from payload.comm.hierarchical import Hierarchical
from payload.comm.nccl import Nccl
from payload.comm.ring import Ring
from payload.comm.transport import MpiTransport
from payload.comm.world import local_rank
from payload.device import choose, fuse
from payload.device.base import Array, Device
from payload.models import bert, gpt, lstm, mlp, resnet, vit
from payload.nn.activation import ReLU
from payload.nn.linear import Linear
from payload.nn.module import LayerContext, Sequential, Unit
from payload.optim.precision import PRECISIONS
from payload.parallel.engine import Engine
from payload.parallel.mesh import Mesh, make_mesh
from payload.parallel.pipeline import MicroBatch
from tests.support.doubles import cublaslt, cudnn
from tests.support.doubles.layers import cut, engine_of
from tests.support.doubles.streams import Streamed
from tests.support.doubles.strict import Strict


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a layout; data-parallel over the ranks that are left."""

    model: str
    tp: int = 1
    pp: int = 1
    zero: int = 0
    offload: bool = False
    micro_batches: int = 1
    recompute: bool = False
    bucket_bytes: int = 25 << 20
    transport: str = "mpi"
    precision: str = "fp32"

    def __str__(self) -> str:
        other = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return " ".join(f"{name}={value}" for name, value in other.items())


TRANSPORTS: dict[str, Callable[..., MpiTransport]] = {
    "mpi": mpi.MpiCommunicator,
    "ring": Ring,
    "hierarchical": Hierarchical,
    "nccl": Nccl,
}

SMALL = 512  # a few buckets in every model

CORE: dict[int, list[Case]] = {
    2: [
        Case("mlp", micro_batches=2, bucket_bytes=SMALL),
        Case("mlp", pp=2, micro_batches=5),
        Case("tied", pp=2, micro_batches=2),
        Case("lstm", zero=1, bucket_bytes=SMALL, offload=True),
        Case("lstm", pp=2, micro_batches=3, recompute=True),
        Case("gpt", tp=2, micro_batches=2),
        Case("gpt", pp=2, micro_batches=3, recompute=True),
        Case("gpt", zero=3, micro_batches=2, bucket_bytes=SMALL, recompute=True),
        Case("bert", tp=2, recompute=True),
        Case("bert", pp=2, micro_batches=4),
        Case("bert", zero=2, micro_batches=3, bucket_bytes=SMALL),
        Case("vit", tp=2),
        Case("vit", zero=1, bucket_bytes=SMALL, transport="ring"),
        Case("resnet", zero=3, bucket_bytes=SMALL),
        Case("resnet", pp=2, recompute=True),
    ],
    4: [
        Case("mlp", pp=2, micro_batches=3, bucket_bytes=SMALL),
        Case("mlp", pp=4, micro_batches=6, recompute=True),
        Case("tied", pp=2, zero=1, bucket_bytes=SMALL),
        Case("lstm", pp=2, zero=3, micro_batches=2),
        Case("gpt", tp=2, pp=2, micro_batches=3),
        Case("gpt", tp=2, zero=2, micro_batches=2, bucket_bytes=SMALL, recompute=True),
        Case("gpt", pp=2, zero=3, micro_batches=2, bucket_bytes=SMALL),
        Case("gpt", tp=4, micro_batches=2),
        Case("lstm", tp=2, micro_batches=2),
        Case("bert", pp=2, zero=2, micro_batches=3, recompute=True, bucket_bytes=SMALL),
        Case("bert", tp=2, zero=1, offload=True, bucket_bytes=SMALL),
        Case("vit", tp=2, pp=2, micro_batches=2, recompute=True),
        Case("vit", pp=4, micro_batches=3),
        Case("vit", tp=2, bucket_bytes=SMALL, transport="hierarchical"),
        Case("bert", pp=2, zero=3, micro_batches=2, bucket_bytes=SMALL, transport="ring"),
        Case("resnet", pp=2, bucket_bytes=SMALL),
    ],
}

FUSED: list[Case] = [
    Case("gpt", tp=2, precision="bf16"),
    Case("gpt", pp=2, micro_batches=2, precision="bf16"),
    Case("gpt", zero=3, bucket_bytes=SMALL, precision="bf16"),
    Case("bert", tp=2, recompute=True, precision="bf16"),
    Case("bert", zero=1, micro_batches=2, precision="bf16"),
    Case("vit", zero=2, precision="bf16"),
    Case("resnet", precision="bf16"),
    Case("resnet", pp=2, precision="bf16"),
]

NCCL: list[Case] = [
    Case("mlp", pp=2, micro_batches=5, transport="nccl"),
    Case("gpt", tp=2, micro_batches=2, transport="nccl"),
    Case("bert", zero=3, micro_batches=3, bucket_bytes=SMALL, transport="nccl"),
    Case("lstm", zero=1, bucket_bytes=SMALL, offload=True, transport="nccl"),
    Case("resnet", bucket_bytes=SMALL, transport="nccl"),
]
"""Every rank needs its own GPU."""


def _tied(context: LayerContext) -> list[Unit]:
    """The same layer in the first and the last unit."""
    shared = Linear(context, "shared", 12, 12)
    between = [
        Unit(f"linear{i}", Sequential(Linear(context, f"linear{i}", 12, 12), ReLU()))
        for i in range(3)
    ]
    return [Unit("first", Sequential(shared, ReLU())), *between, Unit("last", shared)]


@dataclass(frozen=True, slots=True)
class Model:
    """A small model, and how to train it."""

    build: Callable[[LayerContext], list[Unit]]
    shape: tuple[int, ...]  # of one sample
    classes: int
    tokens: bool = False
    lr: float = 0.1
    clip: float = 2.0
    split_logits: bool = False
    batches: tuple[int, ...] = (13, 7, 2)
    """Sizes of global batches, in turn: no layout divides them evenly, and to some ranks falls
    nothing.
    """

    def data(self, samples: int = 40) -> tuple[Array, Array]:
        """Inputs and targets; of tokens a half does not count."""
        rng = np.random.default_rng(3)
        if not self.tokens:
            x = rng.standard_normal((samples, *self.shape)).astype("float32")
            return x, rng.integers(0, self.classes, samples)
        x = rng.integers(0, self.classes, (samples, *self.shape))
        return x, np.where(rng.random(x.shape) < 0.5, (3 * x + 1) % self.classes, -1)


_BLOCKS = {"layers": 2, "heads": 4, "width": 16, "dropout": 0.1}
_TEXT: dict[str, Any] = {"shape": (6,), "classes": 24, "tokens": True}

MODELS = {
    # Its activations and gradients are more than MPI sends before the other side asks for them.
    "mlp": Model(
        partial(mlp.build, inputs=12, classes=5, hidden=(300, 400, 300)),
        (12,),
        5,
        lr=0.01,
        clip=10.0,
    ),
    "tied": Model(_tied, (12,), 12),
    "lstm": Model(
        partial(lstm.build, classes=24, vocabulary=24, length=6, width=9, layers=2),
        lr=1.0,
        clip=0.3,
        **_TEXT,
    ),
    "gpt": Model(
        partial(gpt.build, vocabulary=24, length=6, **_BLOCKS),
        lr=0.5,
        clip=1.0,
        split_logits=True,
        **_TEXT,
    ),
    "bert": Model(
        partial(bert.build, vocabulary=24, length=6, **_BLOCKS),
        lr=0.2,
        clip=2.0,
        split_logits=True,
        **_TEXT,
    ),
    "resnet": Model(
        partial(resnet.build, side=8, classes=5, width=4),
        (8, 8, 3),
        5,
        lr=0.02,
        clip=4.0,
        batches=(17, 13, 11),  # what is normalised over two samples is ±1, or rounding
    ),
    "vit": Model(
        partial(vit.build, side=8, channels=3, patch=4, classes=5, **_BLOCKS),
        (8, 8, 3),
        5,
        lr=0.05,
        clip=2.0,
    ),
}


def make_engine(case: Case, mesh: Mesh, device: Device) -> tuple[Engine, list[Unit]]:
    model = MODELS[case.model]
    units = model.build(mesh.context(device))
    names = ("recompute", "zero", "offload", "bucket_bytes")
    options = {"seed": 5, "clip": model.clip, **{name: getattr(case, name) for name in names}}
    options["precision"] = PRECISIONS[case.precision]
    return engine_of(device, mesh, units, split=model.split_logits, **options), units


def steps(case: Case, engine: Engine, iterations: int) -> dict[str, Any]:
    model = MODELS[case.model]
    device = engine.device
    mesh = engine.mesh
    inputs, targets = (device.asarray(array) for array in model.data())
    if not model.tokens:
        inputs = inputs.astype(PRECISIONS[case.precision].compute)

    def share(indices: Array) -> Sequence[MicroBatch]:
        bounds = [len(indices) * rank // mesh.dp.size for rank in range(mesh.dp.size + 1)]
        places = np.arange(*bounds[mesh.dp.rank : mesh.dp.rank + 2])
        mine = device.asarray(indices[places])
        samples = device.asarray(places.astype("uint32"))
        return cut(MicroBatch(inputs[mine], targets[mine], samples), case.micro_batches)

    order = np.random.default_rng(4)
    losses = []
    norms = []
    for iteration in range(1, iterations + 1):
        chosen = order.permutation(len(inputs))[: model.batches[iteration % len(model.batches)]]
        count = targets[device.asarray(chosen)].size  # more than those that count
        outcome = engine.step(share(chosen), targets=count, iteration=iteration, lr=model.lr)
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    _check_copies(engine)
    evaluation = engine.evaluate(share(np.arange(len(inputs))))
    return {"losses": losses, "norms": norms, "evaluation": [evaluation.loss, evaluation.accuracy]}


def train(case: Case, mesh: Mesh, device: Device, iterations: int) -> dict[str, Any]:
    """Some steps, of which each must be as on one rank, and an evaluation."""
    engine, _ = make_engine(case, mesh, device)
    return steps(case, engine, iterations)


def _check_copies(engine: Engine) -> None:
    """What several stages, or all tensor-parallel ranks, hold is the same on all of them, to the
    bit.
    """
    storage = engine.storage
    mine = {
        (s.parameter.name, s.offset): storage.optimizer_device.to_host(
            storage.master_weights[s.start : s.stop]
        ).tobytes()
        for s in storage.segments
    }
    for other_copies in engine.mesh.pp.allgather(mine):
        assert all(
            mine[place] == other_copies[place] for place in mine.keys() & other_copies.keys()
        )
    whole = {s.parameter.name for s in storage.segments if s.parameter.axis is None}
    copies = {place: mine[place] for place in mine if place[0] in whole}
    assert all(other_copies == copies for other_copies in engine.mesh.tp.allgather(copies))


def fuse_all(device: Device) -> None:
    """Compute 16-bit layers by cuDNN and cuBLASLt, or by their doubles on the double of CuPy."""
    if isinstance(device, Strict):
        device.fuse(cudnn, cublaslt, deterministic=True)  # type: ignore[arg-type]
    else:
        fuse(device, deterministic=True)


def main() -> None:
    ranks = mpi.start().size
    iterations = int(sys.argv[2])
    double = sys.argv[3:] == ["double"]
    device = Streamed(local_rank()) if double else choose("auto", local_rank())
    if sys.argv[1] == "fused":
        fuse_all(device)

    @cache
    def world(transport: str) -> MpiTransport:
        return TRANSPORTS[transport](device)

    @cache
    def mesh(transport: str, tp: int, pp: int) -> Mesh:
        return make_mesh(world(transport), tp=tp, pp=pp)

    cases = {"core": CORE[ranks], "fused": FUSED, "nccl": NCCL}[sys.argv[1]]
    answers = {
        str(case): train(case, mesh(case.transport, case.tp, case.pp), device, iterations)
        for case in cases
    }
    if world("mpi").rank == 0:
        sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
