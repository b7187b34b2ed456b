"""Runs over a communicator that gives the last rank a wrong sum, or a wrong token.

The first argument is the lie, the second what is run: probe, gemm or allreduce.
"""

import json
import sys
from pathlib import Path
from typing import Any

from payload.cli.config import AllreduceConfig, GemmConfig
from payload.cli.values import GemmSize
from payload.comm import mpi
from payload.comm.world import MPI
from payload.commands import allreduce, gemm, probe
from payload.device.base import Array, CpuDevice


class Liar(mpi.MpiCommunicator):
    def allreduce(self, array: Array) -> None:
        super().allreduce(array)
        if sys.argv[1] == "sum" and self.rank == self.size - 1 and array.size > 200_000:
            array[-1] += 1


class BareLiar(MPI.Intracomm):
    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:  # noqa: N802
        super().Allreduce(sendbuf, recvbuf, op)
        if sys.argv[1] == "sum" and self.rank == self.size - 1 and len(recvbuf) > 200_000:
            recvbuf[-1] += 1

    def sendrecv(self, sendobj: Any, *args: Any, **kwargs: Any) -> Any:
        received = super().sendrecv(sendobj, *args, **kwargs)
        return sendobj if sys.argv[1] == "token" and self.rank == self.size - 1 else received


mpi.start()
comm = Liar()
if sys.argv[2] == "probe":
    answer = probe.probe((), BareLiar(MPI.COMM_WORLD))
    if comm.rank == 0:
        sys.stdout.write(json.dumps(answer))
elif sys.argv[2] == "allreduce":
    sizes = AllreduceConfig(max=1 << 20, iterations=1, device="cpu", out=Path(sys.argv[3]))
    sys.exit(not allreduce.allreduce(sizes, CpuDevice(), comm, {"mpi": comm}))
else:
    odd = GemmSize(400, 3, 601)  # a row of an odd number of ±1 never adds up to 0
    out = Path(sys.argv[3])
    gemm.gemm(
        GemmConfig((odd,), ("float32",), 1, 1, seed=0, device="cpu", out=out), CpuDevice(), comm
    )
