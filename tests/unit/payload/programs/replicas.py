"""Ranks that start with different weights have rank 0's once they train together."""

import numpy as np

from payload.comm import mpi
from payload.device import Cpu
from payload.models import mlp
from payload.nn.module import Context
from payload.parallel.mesh import Options, alone, make_mesh
from payload.parallel.zero import Storage

comm = mpi.start()
device = Cpu()


def values(seed: int, dp: object) -> object:
    units = mlp.build(Context(device), inputs=8, classes=3, hidden=(4,))
    return Storage(device, units, dp, Options(seed=seed)).master_weights  # type: ignore[arg-type]


first = values(0, alone().dp)
assert comm.rank == 0 or (values(comm.rank, alone().dp) != first).any()
np.testing.assert_array_equal(values(comm.rank, make_mesh(comm).dp), first)
