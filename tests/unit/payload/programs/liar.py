"""Probes over a communicator that gives the last rank a wrong sum, or a wrong token, as the argument says."""

import json
import sys
from typing import TypeVar

from payload import probe
from payload.comm import mpi
from payload.config import ProbeConfig
from payload.device import Array, Cpu

T = TypeVar("T")


class Liar(mpi.MpiCommunicator):
    def allreduce(self, array: Array) -> None:
        super().allreduce(array)
        if sys.argv[1] == "sum" and self.rank == self.size - 1 and array.size > 200_000:
            array[-1] += 1

    def exchange(self, value: T, dest: int, source: int) -> T:
        received = super().exchange(value, dest, source)
        return value if sys.argv[1] == "token" and self.rank == self.size - 1 else received


mpi.start()
comm = Liar()
answer = probe.probe(ProbeConfig(expect_hosts=(), device="cpu"), Cpu(), comm)
if comm.rank == 0:
    sys.stdout.write(json.dumps(answer))
