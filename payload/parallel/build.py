"""Makes an engine of a model's units and a mesh, for everything that trains, evaluates or measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from numpy.typing import DTypeLike

from payload.device import Array, Device
from payload.errors import UsageError
from payload.nn.base import Unit
from payload.nn.loss import Loss
from payload.optim import Optimizer
from payload.parallel.engine import Engine
from payload.parallel.mesh import Mesh
from payload.parallel.pipeline import Pipeline
from payload.parallel.placement import Ties, split
from payload.parallel.reducer import Reducer
from payload.parallel.schedule import InTurn
from payload.parallel.stage import Stage
from payload.parallel.storage import Replicated


def assemble(
    device: Device,
    mesh: Mesh,
    units: Sequence[Unit],
    loss: Loss,
    make_optimizer: Callable[[Array], Optimizer],
    *,
    seed: int = 0,
    dtype: DTypeLike = "float32",
    master_dtype: DTypeLike = "float32",
    clip: float = math.inf,
    bucket_bytes: int = 25 << 20,
    overlap: bool = True,
) -> Engine:
    """
    Args:
        units: the whole model, built with ``mesh.context(device)``: parameters take no memory before this.
        make_optimizer: of the values that this rank updates.
        seed: of first values and of dropout.
        dtype: of parameters and activations.
        master_dtype: of gradients, and of what the optimizer updates.
        clip: the norm above which gradients are scaled down to it.
        bucket_bytes: gradients that are summed at once, over data-parallel ranks.
        overlap: sum them while the backward pass goes on.

    Raises:
        UsageError: the model cannot be laid out on this mesh.
    """
    if mesh.tp.size > 1 and all(p.axis is None for unit in units for p in unit.layer.parameters):
        raise UsageError(f"--tp {mesh.tp.size}: this model has no tensor-parallel layers")
    stages = split(units, mesh.pp.size)
    own = stages[mesh.pp.rank]
    ties = Ties(stages, mesh.pp, device)
    storage = Replicated(
        device,
        [ties.unit, *own] if ties.unit else own,
        mesh.dp,
        Reducer(mesh.dp, bucket_bytes=bucket_bytes, overlap=overlap),
        seed=seed,
        dtype=dtype,
        master_dtype=master_dtype,
    )
    stage = Stage(own, storage, ties.unit)
    schedule = Pipeline(device, stage, loss, mesh.pp) if mesh.pp.size > 1 else InTurn(stage, loss)
    return Engine(
        device, mesh, storage, schedule, make_optimizer(storage.values), ties=ties, seed=seed, clip=clip
    )
