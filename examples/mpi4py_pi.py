"""MPI in Python with mpi4py, which every node has: compute pi by the midpoint rule, a slice per
rank.

clusterctl submit examples/mpi4py_pi.py --nodes 2 --tasks-per-node 2 --follow
"""

import math
import socket

import numpy as np
from mpi4py import MPI

STEPS = 1_000_000

comm = MPI.COMM_WORLD
middles = (np.arange(comm.rank, STEPS, comm.size) + 0.5) / STEPS
slice_of_pi = float((4 / (1 + middles**2)).sum() / STEPS)
pi = comm.allreduce(slice_of_pi)
hosts = comm.gather(socket.gethostname())
if comm.rank == 0:
    print(f"pi is {pi:.10f} by {comm.size} ranks on {', '.join(sorted(set(hosts)))}")
assert abs(pi - math.pi) < 1e-9, pi
