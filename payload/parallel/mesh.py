"""The mesh of ranks (data-, tensor- and pipeline-parallel groups), and options for training on
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from payload.comm.base import Communicator, Solo
from payload.device.base import Device
from payload.nn.module import LayerContext
from payload.optim.precision import PRECISIONS, Precision
from payload.parallel.ranks import data_parallel_ranks

if TYPE_CHECKING:
    from payload.comm.transport import MpiTransport  # needs MPI


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of DP x TP x PP ranks. The rank at (dp, tp, pp) has the number (pp · DP + dp) · TP +
    tp.

    Tensor-parallel ranks communicate most, so they have consecutive numbers and share a node.
    Pipeline stages communicate least, so a pipeline may span many nodes.
    """

    world: Communicator
    # Ranks with the same tensors and stage, but different samples.
    dp: Communicator
    # Ranks with other parts of the same tensors.
    tp: Communicator
    # Ranks with other stages of the same samples.
    pp: Communicator

    def context(self, device: Device) -> LayerContext:
        """Return the device and communicators for building the layers of this rank."""
        return LayerContext(device, tp=self.tp, dp=self.dp)


def alone() -> Mesh:
    """Return a mesh of a single rank."""
    solo = Solo()
    return Mesh(solo, solo, solo, solo)


def make_mesh(world: MpiTransport, *, tp: int = 1, pp: int = 1) -> Mesh:
    """Arrange all ranks as dp x tp x pp. Raise UsageError if tp x pp does not divide the number of
    ranks.
    """
    dp = data_parallel_ranks(world.size, tp=tp, pp=pp)
    rank = world.rank
    position = (rank // (dp * tp), rank // tp % dp, rank % tp)  # pp, dp, tp

    def group(size: int, color: int) -> Communicator:
        if size == 1:
            return Solo()
        return world if size == world.size else world.split(color, rank)

    return Mesh(
        world,
        dp=group(dp, position[0] * tp + position[2]),
        tp=group(tp, position[0] * dp + position[1]),
        pp=group(pp, position[1] * tp + position[2]),
    )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the distribution over ranks and of the training step."""

    # Seed of initial weights and dropout.
    seed: int = 0
    precision: Precision = PRECISIONS["fp32"]
    # Gradients with a larger norm are scaled down to this norm.
    clip: float = math.inf
    # Whether to keep only the activations between units, and recompute the rest.
    recompute: bool = False
    # ZeRO stage, 0 to 3: see ``zero``.
    zero: int = 0
    # Whether the optimizer and its data are in host memory.
    offload: bool = False
    # Minimum bytes of gradients that are summed in a single call. The default is that of PyTorch's
    # DDP.
    bucket_bytes: int = 25 << 20
    # Whether stages 0 and 1 sum gradients during the backward pass, not after it.
    overlap: bool = True
    # Whether a GPU runs micro-batches as CUDA graphs, see ``captured``.
    capture: bool = False
