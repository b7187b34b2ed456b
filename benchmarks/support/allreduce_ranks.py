"""What ``allreduce.compare`` starts on each rank. All sides take turns in the same processes."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import distributed

from benchmarks.support import gloo
from benchmarks.support.allreduce import BARE, GLOO, OURS
from payload.cli.config import COMPRESSORS
from payload.comm import mpi
from payload.comm.compression import ParamSlice, make_compressor

_SIZES = [4096 * 4**power for power in range(9)]
_TURN_S = 0.01
"""One side's turn takes about so long, or one sum."""

_SHAPES = [(784, 2048), (2048,), (2048, 2048), (2048,), (2048, 10), (10,)]

Act = Callable[[], object]
world = mpi.start()


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    gloo.join(world)
    sizes = [{"nbytes": nbytes, "rounds": sums(nbytes, rounds)} for nbytes in _SIZES]
    answer = {"sizes": sizes, "wire": {name: wire(name, rounds) for name in ("none", *COMPRESSORS)}}
    distributed.destroy_process_group()
    if world.rank == 0:
        sys.stdout.write(json.dumps(answer))


def sums(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a sum of each side in each round, of the slower rank; each side's first sum is
    checked.
    """
    arrays = {side: np.full(nbytes // 4, world.rank + 1, np.float32) for side in (OURS, BARE, GLOO)}
    tensor = torch.from_numpy(arrays[GLOO])
    comm = mpi.MpiCommunicator()
    bare = mpi.MPI.COMM_WORLD.Dup()
    sides: dict[str, Act] = {
        OURS: lambda: comm.allreduce(arrays[OURS]),
        BARE: lambda: bare.Allreduce(mpi.MPI.IN_PLACE, arrays[BARE], op=mpi.MPI.SUM),
        GLOO: lambda: distributed.all_reduce(tensor),
    }
    counts = {}
    for side, act in sides.items():
        act()
        assert (arrays[side] == world.size * (world.size + 1) / 2).all(), side
        arrays[side][...] = 0
        counts[side] = min(10_000, max(1, int(_TURN_S / min(seconds(act, 3) for _ in range(3)))))
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, act in sides.items():
            taken[side].append(seconds(act, counts[side]))
    return taken


def wire(name: str, rounds: int) -> dict[str, float]:
    """Bytes that a rank sends, and seconds that a sum takes."""
    sizes = [math.prod(shape) for shape in _SHAPES]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    mine = np.random.default_rng(world.rank).standard_normal(sum(sizes)).astype(np.float32)
    grads = mine.copy()
    transport = mpi.MpiCommunicator()
    compressor = None if name == "none" else make_compressor(name, transport)
    if compressor:
        compressor.attach(
            grads, [ParamSlice(*slice_) for slice_ in zip(starts, _SHAPES, strict=True)]
        )
    comm = compressor or transport
    taken = []
    for _ in range(rounds):
        grads[...] = mine
        taken.append(seconds(lambda: comm.allreduce(grads), 1))
    return {"bytes": comm.bytes_sent / rounds, "seconds": statistics.median(taken)}


def seconds(act: Act, count: int) -> float:
    """Of one of ``count`` in a row, on the slower rank."""
    world.barrier()
    began = time.perf_counter()
    for _ in range(count):
        act()
    return max(world.allgather((time.perf_counter() - began) / count))


if __name__ == "__main__":
    main(int(sys.argv[1]))
