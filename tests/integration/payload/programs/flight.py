"""How many micro-batches are in flight on each stage, under 1F1B."""

from __future__ import annotations

import numpy as np

from payload.comm import mpi
from payload.device.base import Array, CpuDevice
from payload.nn.module import Sequential, Tape, Unit
from payload.parallel.mesh import make_mesh
from tests.support.doubles.layers import batch_of, cut, engine_of

MICRO_BATCHES = 7


class Counting(Sequential):
    """Knows how many of its forward passes still wait for their backward pass."""

    flying = most = 0

    def forward(self, x: Array, tape: Tape) -> Array:  # noqa: ARG002
        self.flying += 1
        self.most = max(self.most, self.flying)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:  # noqa: ARG002
        self.flying -= 1
        return dy


mpi.start()
world = mpi.MpiCommunicator()
device = CpuDevice()
layer = Counting()
units = [Unit(str(rank), layer) for rank in range(world.size)]
engine = engine_of(device, make_mesh(world, pp=world.size), units)
batch = batch_of(device, np.ones((20, 3), "float32"), np.zeros(20, int))
for iteration in (1, 2):
    engine.step(cut(batch, MICRO_BATCHES), targets=20, iteration=iteration, lr=0.1)
assert (layer.flying, layer.most) == (0, world.size - world.rank)
