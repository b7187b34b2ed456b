"""bench on three ranks, of which two share a GPU. A double of NVML shows two GPUs at work.

Each iteration takes 0.6 s by the clock of the GPUs, which are active in 80 % of it, at 100 W.
"""

import sys

import pytest

from payload.cli.arguments import parse
from payload.cli.config import BenchConfig
from payload.comm import make_transport, mpi
from payload.commands.bench import bench
from payload.device.base import CpuDevice
from tests.support.doubles.nvml import DRAM, Gpu, Nvml

ranks = mpi.start()
out, turn, *others = sys.argv[1:]
first = Gpu(levels={1: 80, DRAM: 50}, watts=100, pids=[1, 2, *map(int, others)])
library = Nvml(first, Gpu(levels={1: 60, DRAM: 50}, watts=100, pids=[3]))


class Watched(CpuDevice):
    """A CPU that stands for a GPU."""

    gpu = {"index": 0, "name": "NVIDIA H200", "uuid": f"GPU-{ranks.rank // 2}"}  # noqa: RUF012

    def synchronize(self) -> None:
        library.work(0.6)


device = Watched()
flags = "--hidden 16 --global-batch-size 24 --peak-tflops 0.5 --warmup 1 --rounds 2 --ranks 1"
config = parse(["bench", *flags.split(), "--turn", turn, "--out", out])
assert isinstance(config, BenchConfig)
with pytest.MonkeyPatch.context() as patch:
    library.put_into(patch)
    bench(config, device, make_transport("mpi", device, cuda_aware=False))
