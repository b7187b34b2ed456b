"""The mesh of ranks: which share tensors, which share the batch, which are stages of one pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from payload.comm.base import Communicator, Solo
from payload.comm.transport import Transport
from payload.device import Device
from payload.errors import UsageError
from payload.nn.base import Context


@dataclass(frozen=True, slots=True)
class Mesh:
    """dp x tp x pp ranks. Neighbours in rank are tensor-parallel, since these talk most, and share a node;
    stages of a pipeline, which talk least, are farthest apart: rank = (pp · DP + dp) · TP + tp."""

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
            f"--tp {tp} x --pp {pp} does not divide the {world.size} ranks: start a multiple of {tp * pp}"
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
