"""Ranks that start with different weights have rank 0's once they train together."""

import numpy as np

from payload.comm import mpi
from payload.device import Cpu
from payload.models.mlp import MLP
from payload.nn.loss import SoftmaxCrossEntropy
from payload.parallel.data import DataParallel

comm = mpi.start()
first = MLP(Cpu(), (8, 4, 3), dtype="float64", seed=0).buffers.values
model = MLP(Cpu(), (8, 4, 3), dtype="float64", seed=comm.rank)
assert comm.rank == 0 or (model.buffers.values != first).any()
DataParallel(model, SoftmaxCrossEntropy(Cpu()), comm)
np.testing.assert_array_equal(model.buffers.values, first)
