"""A run may end after any step: nothing is under way then, of messages that are not small."""

import sys

import numpy as np

from payload.comm import mpi
from payload.device import Cpu
from payload.models import gpt
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import Context
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import Options, make_mesh
from payload.parallel.pipeline import MicroBatch

comm = mpi.start()
device = Cpu()
engine = Engine(
    device,
    make_mesh(mpi.MpiCommunicator(device)),
    gpt.build(Context(device), vocabulary=4096, length=8, layers=2, heads=4, width=256),
    SoftmaxCrossEntropy(Context(device)),
    lambda storage: SGD(storage.optimizer_device, storage.master_weights, storage.segments),
    options=Options(zero=int(sys.argv[1]), bucket_bytes=1),
)
tokens = np.random.default_rng(comm.rank).integers(0, 4096, (2, 9))
batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], np.arange(2, dtype="uint32"))
for iteration in range(2):
    assert engine.step([batch], targets=16 * comm.size, iteration=iteration, lr=1e-3).finite
