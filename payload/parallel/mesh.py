"""The mesh of ranks (data-, tensor- and pipeline-parallel groups), and how a model is laid out on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from payload.comm.base import Communicator, Solo
from payload.device.base import Device
from payload.errors import UsageError
from payload.nn.module import Context
from payload.optim.precision import PRECISIONS, Precision

if TYPE_CHECKING:
    from payload.comm.transport import Transport  # it needs MPI, which one rank does without


@dataclass(frozen=True, slots=True)
class Mesh:
    """dp x tp x pp ranks. Neighbours in rank are tensor-parallel, since these talk most, and share a node;
    stages of a pipeline, which talk least, have the most distant ranks: rank = (pp · DP + dp) · TP + tp."""

    world: Communicator
    dp: Communicator  # same tensors, same stage, other samples
    tp: Communicator  # other parts of the same tensors
    pp: Communicator  # other stages of the same samples

    def context(self, device: Device) -> Context:
        """What the layers of this rank are built with."""
        return Context(device, tp=self.tp, dp=self.dp)


def alone() -> Mesh:
    """A mesh of one rank."""
    solo = Solo()
    return Mesh(solo, solo, solo, solo)


def make_mesh(world: Transport, *, tp: int = 1, pp: int = 1) -> Mesh:
    """All ranks as dp x tp x pp, dp being what is left.

    Raises:
        UsageError: the number of ranks is no multiple of tp x pp.
    """
    dp, rest = divmod(world.size, tp * pp)
    if rest:
        raise UsageError(
            f"--tp {tp} x --pp {pp} does not divide the {world.size} ranks: start a multiple of {tp * pp}",
            code="ranks-not-divisible",
        )
    rank = world.rank
    here = (rank // (dp * tp), rank // tp % dp, rank % tp)  # pp, dp, tp

    def group(size: int, color: int) -> Communicator:
        if size == 1:
            return Solo()
        return world if size == world.size else world.split(color, rank)

    return Mesh(
        world,
        dp=group(dp, here[0] * tp + here[2]),
        tp=group(tp, here[0] * dp + here[1]),
        pp=group(pp, here[1] * tp + here[2]),
    )


@dataclass(frozen=True, slots=True)
class Options:
    """What the mesh does not say."""

    seed: int = 0  # of first values and of dropout
    precision: Precision = PRECISIONS["fp32"]
    clip: float = math.inf  # the norm above which gradients are scaled down to it
    recompute: bool = False  # keep no activations but those between units
    zero: int = 0  # the stage, 0 to 3: see ``zero``
    offload: bool = False  # what the optimizer works on is in the memory of the host
    bucket_bytes: int = 25 << 20  # of gradients, at least, that are summed in one call; as PyTorch's DDP
    overlap: bool = True  # at stages 0 and 1 sum while the backward pass goes on, not after it
