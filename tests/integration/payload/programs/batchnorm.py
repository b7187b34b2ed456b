"""However the samples of a batch lie on three ranks, batch normalisation gives what one rank
gives.
"""

import numpy as np

from payload.comm import mpi
from payload.comm.base import Communicator, Solo
from payload.comm.world import local_rank
from payload.device import choose
from payload.device.base import Array
from payload.nn.module import LayerContext, Tape, Unit
from payload.nn.norm import BatchNorm
from payload.optim.precision import PRECISIONS
from payload.parallel.mesh import EngineOptions, alone
from payload.parallel.zero import FlatStorage

mpi.start()
device = choose("auto", local_rank())
world = mpi.MpiCommunicator(device)


def run(dp: Communicator, x: Array, dy: Array) -> list[Array]:
    """Output, gradients by input and by parameters, and running averages."""
    layer = BatchNorm(LayerContext(device, dp=dp), "n", 5, relu=True)
    storage = FlatStorage(
        device, [Unit("n", layer)], alone().dp, EngineOptions(seed=1, precision=PRECISIONS["fp64"])
    )
    storage.begin()
    tape = Tape()
    y = layer.forward(x, tape)
    dx = layer.backward(dy, tape)
    dp.allreduce(storage.grads)
    return [device.to_host(array).copy() for array in (y, dx, storage.grads, *layer.state.values())]


rng = np.random.default_rng(1)
x, dy = (device.asarray(3 + rng.standard_normal((7, 2, 3, 5))) for _ in range(2))
mine = [slice(0, 0), slice(0, 5), slice(5, 7)][world.rank]
y, dx, *sums = run(Solo(), x, dy)
expected = [y[mine], dx[mine], *sums]
for actual_part, expected_part in zip(run(world, x[mine], dy[mine]), expected, strict=True):
    np.testing.assert_allclose(actual_part, expected_part, rtol=1e-12, atol=1e-12)
