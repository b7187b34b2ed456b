"""Makes an engine of a model's units and a mesh, for everything that trains, evaluates or measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from payload.comm.compressed import Compressed, Piece
from payload.device import Device
from payload.errors import UsageError
from payload.nn.base import Unit
from payload.nn.loss import Loss
from payload.optim.base import Optimizer
from payload.parallel.engine import Engine
from payload.parallel.mesh import Mesh
from payload.parallel.pipeline import Pipeline
from payload.parallel.placement import Ties, split
from payload.parallel.schedule import InTurn
from payload.parallel.stage import Stage
from payload.parallel.storage import BUCKET_BYTES, Storage
from payload.precision import PRECISIONS, LossScale, Precision
from payload.recompute import recomputed


def assemble(
    device: Device,
    mesh: Mesh,
    units: Sequence[Unit],
    loss: Loss,
    make_optimizer: Callable[[Storage], Optimizer],
    *,
    seed: int = 0,
    precision: Precision = PRECISIONS["fp32"],
    loss_scale: LossScale | None = None,
    clip: float = math.inf,
    recompute: bool = False,
    zero: int = 0,
    offload: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
    compressor: Compressed | None = None,
) -> Engine:
    """
    Args:
        units: the whole model, built with ``mesh.context(device)``: parameters take no memory before this.
        make_optimizer: of what this rank updates.
        seed: of first values and of dropout.
        precision: of activations, and of gradients and what the optimizer updates.
        loss_scale: by default none.
        clip: the norm above which gradients are scaled down to it.
        recompute: keep no activations but those between units.
        zero, offload, bucket_bytes, overlap: see ``Storage``.
        compressor: of ``mesh.dp``, or what that times; it is given the gradients to compress.

    Raises:
        UsageError: the model cannot be laid out on this mesh.
    """
    if mesh.tp.size > 1 and all(p.axis is None for unit in units for p in unit.layer.parameters):
        raise UsageError(f"--tp {mesh.tp.size}: this model has no tensor-parallel layers")
    stages = split(recomputed(units) if recompute else units, mesh.pp.size)
    own = stages[mesh.pp.rank]
    ties = Ties(stages, mesh.pp, device)
    storage = Storage(
        device,
        own,
        mesh.dp,
        seed=seed,
        tied=ties.unit,
        zero=zero,
        offload=offload,
        dtype=precision.compute,
        master_dtype=precision.master,
        bucket_bytes=bucket_bytes,
        overlap=overlap,
    )
    if compressor:
        compressor.attach(storage.sums, [Piece(s.start, s.parameter.shape) for s in storage.segments])
    stage = Stage(own, storage, ties.unit)
    schedule = Pipeline(device, stage, loss, mesh.pp) if mesh.pp.size > 1 else InTurn(stage, loss)
    optimizer = make_optimizer(storage)
    return Engine(
        device,
        mesh,
        storage,
        schedule,
        optimizer,
        units=own,
        ties=ties,
        seed=seed,
        clip=clip,
        loss_scale=loss_scale,
        own_state=compressor.state if compressor else None,
    )
