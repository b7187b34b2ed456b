"""What a rank holds under each stage of ZeRO, beside the paper's formula. Prints a table, on rank 0."""

from __future__ import annotations

import numpy as np

from payload.comm import mpi
from payload.device import Cpu
from payload.models import gpt
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim.adamw import AdamW
from payload.parallel.engine import Engine
from payload.parallel.memory import formula, held
from payload.parallel.mesh import Mesh, make_mesh
from payload.parallel.options import Options
from payload.parallel.stage import Batch
from payload.precision import PRECISIONS

SIZES = {"vocabulary": 8192, "length": 64, "layers": 12, "heads": 8, "width": 256}
PRECISION = PRECISIONS["bf16"]


def main() -> None:
    mpi.start()
    world, device = mpi.MpiCommunicator(Cpu()), Cpu()
    mesh = make_mesh(world)
    if world.rank == 0:
        print(f"\nbytes a rank holds, {world.size} ranks, GPT in bf16 with AdamW, without activations (MB)")
        print("  ZeRO  weights  gradients  masters  optimizer  working    total  formula  total / formula")
    for zero in range(4):
        engine = _engine(device, mesh, zero)
        tokens = np.random.default_rng(0).integers(0, SIZES["vocabulary"], (1, SIZES["length"]))
        batch = Batch(tokens, tokens, np.zeros(1, np.uint32))
        engine.step([batch], targets=tokens.size * world.size, iteration=1, lr=1e-3)
        numbers = sum(p.size for p in {id(p): p for u in engine.units for p in u.layer.parameters}.values())
        paper = formula(numbers, precision=PRECISION, states=2, ranks=world.size, zero=zero).total
        found = held(engine)
        if world.rank == 0:
            parts = (found.weights, found.gradients, found.masters, found.optimizer, found.working)
            columns = zip(parts, (7, 9, 7, 9, 7), strict=True)
            shown = "  ".join(f"{part / 1e6:{width}.1f}" for part, width in columns)
            total = f"{found.total / 1e6:7.1f}  {paper / 1e6:7.1f}"
            print(f"  {zero:4}  {shown}  {total}  {found.total / paper:15.2f}")


def _engine(device: Cpu, mesh: Mesh, zero: int) -> Engine:
    context = mesh.context(device)
    return Engine(
        device,
        mesh,
        gpt.build(context, **SIZES),
        SoftmaxCrossEntropy(context),
        lambda storage: AdamW(device, storage.values, storage.segments),
        options=Options(precision=PRECISION, zero=zero, bucket_bytes=1 << 20),
    )


if __name__ == "__main__":
    main()
