"""Trains with sums that come out a little different on the last rank."""

import sys

from payload.__main__ import main
from payload.comm import mpi
from payload.device import Array


class Drifting(mpi.MpiCommunicator):
    def allreduce(self, array: Array) -> None:
        super().allreduce(array)
        if self.rank == self.size - 1:
            array *= 1 + 1e-12


mpi.MpiCommunicator = Drifting  # type: ignore[misc]
sys.exit(main(["train", "--iterations", "2", "--precision", "fp64", "--out", sys.argv[1]]))
