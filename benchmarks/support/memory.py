"""What a rank holds under each stage of ZeRO, beside the paper's formula. Prints a table, on rank
0.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from payload.comm import mpi
from payload.device.base import CpuDevice
from payload.models import gpt
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS, Precision
from payload.parallel.engine import Engine
from payload.parallel.mesh import EngineOptions, Mesh, make_mesh
from payload.parallel.pipeline import MicroBatch

SIZES = {"vocabulary": 8192, "length": 64, "layers": 12, "heads": 8, "width": 256}
PRECISION = PRECISIONS["bf16"]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank, wherever they are; without activations."""

    weights: int  # that layers compute with, unless they are the masters themselves
    gradients: int
    masters: int
    optimizer: int  # its state
    working: int  # buffers, through which weights and gradients of others come and go

    @property
    def total(self) -> int:
        return int(sum(astuple(self)))


def held(engine: Engine) -> Held:
    """By a rank, as far as it has trained: buffers are made when they are needed first."""
    storage = engine.storage
    state = engine.optimizer.state.values()
    return Held(
        weights=0 if storage.weights is storage.master_weights else storage.weights.nbytes,
        gradients=sum(array.nbytes for array in storage.gradients),
        masters=storage.master_weights.nbytes,
        optimizer=sum(array.nbytes for array in state),
        working=storage.working_bytes,
    )


def formula(numbers: int, *, precision: Precision, states: int, ranks: int, zero: int) -> Held:
    """Of a model with so many numbers, on data-parallel ranks: figure 1 of the paper (see
    ``storage``), but with gradients as wide as masters, and without weights where the masters serve
    as such.

    Args:
        states: numbers that the optimizer keeps for each of the model's.
        zero: what is in parts: from stage 1 on masters and optimizer, from 2 gradients, from 3
            weights.
    """
    wide = precision.master.itemsize
    narrow = precision.compute.itemsize
    part = -(-numbers // ranks)
    owned, summed, computed = (part if zero >= stage else numbers for stage in (1, 2, 3))
    weights = 0 if wide == narrow and owned == computed else computed * narrow
    return Held(weights, summed * wide, owned * wide, owned * wide * states, 0)


def main() -> None:
    mpi.start()
    world = mpi.MpiCommunicator(CpuDevice())
    device = CpuDevice()
    mesh = make_mesh(world)
    if world.rank == 0:
        print(
            "\n"
            f"bytes a rank holds, {world.size} ranks, GPT in bf16 with AdamW, without "
            "activations (MB)"
        )
        print(
            "  ZeRO  weights  gradients  masters  optimizer  working    total  formula  total / "
            "formula"
        )
    for zero in range(4):
        engine = _engine(device, mesh, zero)
        tokens = np.random.default_rng(0).integers(0, SIZES["vocabulary"], (1, SIZES["length"]))
        batch = MicroBatch(tokens, tokens, np.zeros(1, np.uint32))
        engine.step([batch], targets=tokens.size * world.size, iteration=1, lr=1e-3)
        numbers = sum(
            p.size for p in {id(p): p for u in engine.units for p in u.layer.parameters}.values()
        )
        paper = formula(numbers, precision=PRECISION, states=2, ranks=world.size, zero=zero).total
        found = held(engine)
        if world.rank == 0:
            parts = (found.weights, found.gradients, found.masters, found.optimizer, found.working)
            columns = zip(parts, (7, 9, 7, 9, 7), strict=True)
            shown = "  ".join(f"{part / 1e6:{width}.1f}" for part, width in columns)
            total = f"{found.total / 1e6:7.1f}  {paper / 1e6:7.1f}"
            print(f"  {zero:4}  {shown}  {total}  {found.total / paper:15.2f}")


def _engine(device: CpuDevice, mesh: Mesh, zero: int) -> Engine:
    context = mesh.context(device)
    return Engine(
        device,
        mesh,
        gpt.build(context, **SIZES),
        SoftmaxCrossEntropy(context),
        lambda storage: AdamW(device, storage.master_weights, storage.segments),
        options=EngineOptions(precision=PRECISION, zero=zero, bucket_bytes=1 << 20),
    )


if __name__ == "__main__":
    main()
