"""A run may end after any step: nothing is under way then, of messages that are not small."""

import sys

import numpy as np

from payload.comm import mpi
from payload.device.base import CpuDevice
from payload.models import gpt
from payload.nn.module import LayerContext
from payload.parallel.mesh import make_mesh
from tests.support.doubles.layers import batch_of, engine_of

comm = mpi.start()
device = CpuDevice()
mesh = make_mesh(mpi.MpiCommunicator(device))
units = gpt.build(LayerContext(device), vocabulary=4096, length=8, layers=2, heads=4, width=256)
engine = engine_of(device, mesh, units, zero=int(sys.argv[1]), bucket_bytes=1)
tokens = np.random.default_rng(comm.rank).integers(0, 4096, (2, 9))
batch = batch_of(device, tokens[:, :-1], tokens[:, 1:])
for iteration in range(2):
    assert engine.step([batch], targets=16 * comm.size, iteration=iteration, lr=1e-3).finite
