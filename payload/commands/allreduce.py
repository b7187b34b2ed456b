"""How fast ranks sum, by size of the array and by transport; every sum is checked first.

Figures are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): where
the sum of S bytes on n ranks takes t seconds, the algorithm bandwidth is S / t, and the bus bandwidth that
times 2 (n - 1) / n, which does not depend on n where the slowest link is kept busy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from payload.cli.config import AllreduceConfig
from payload.cli.report import Report, begin, place
from payload.comm import make_transport
from payload.comm.base import Communicator
from payload.device.base import Device

Record = dict[str, Any]

_GROWTH = 4
"""From one size to the next."""

_IN_A_ROW_BYTES = 1 << 20
"""Small sums are timed so many bytes at once: one alone is shorter than ranks differ in leaving a barrier."""

_MOST_IN_A_ROW = 256
"""By then the smallest sums take far longer than that, too."""

_PATTERN = 251
"""What is summed repeats after this many numbers: a prime, so that a misplaced piece shows."""


def run(config: AllreduceConfig) -> int:
    """Check, measure, print, and give the exit code: 0, or 1 if a sum is wrong."""
    world, device = begin(config.device)
    comms = {name: make_transport(name, device, cuda_aware=config.cuda_aware) for name in config.comm}
    return 0 if allreduce(config, device, world, comms) else 1


def allreduce(
    config: AllreduceConfig, device: Device, world: Communicator, comms: Mapping[str, Communicator]
) -> bool:
    """Whether all sums are right; rank 0 prints and writes the figures."""
    report = Report(world, config.out / "allreduce.jsonl")
    places = world.allgather(place(world.rank, device))
    records = []
    wanted = sizes(config.min, config.max)
    for count in dict.fromkeys(_count(nbytes, config.dtype) for nbytes in wanted):  # each once
        for name, comm in comms.items():
            record = _measure(name, comm, device, count, config)
            records.append(record)
            report.write("allreduce", **record)
            report.print_line(_words(record))
    ok = all(record["ok"] for record in records)
    report.answer(ok=ok, world_size=world.size, ranks=places, results=records)
    return ok


def sizes(least: int, most: int) -> list[int]:
    """In bytes, each some times the one before, and the largest last."""
    found = []
    while least < most:
        found.append(least)
        least *= _GROWTH
    return [*found, most]


def _measure(name: str, comm: Communicator, device: Device, count: int, config: AllreduceConfig) -> Record:
    """The median round of the slowest rank, and whether the sums are right on all."""
    wrong = comm.allgather(_wrong(comm, device, count, config.dtype))
    array = device.xp.zeros(count, _dtype(config.dtype))
    in_a_row = min(max(1, _IN_A_ROW_BYTES // array.nbytes), _MOST_IN_A_ROW)
    taken, sent = [], comm.bytes_sent
    for _ in range(config.iterations):
        comm.barrier()
        device.synchronize()
        began = time.perf_counter()
        for _ in range(in_a_row):
            comm.allreduce(array)
        device.synchronize()
        taken.append((time.perf_counter() - began) / in_a_row)
    seconds = max(comm.allgather(statistics.median(taken)))
    bandwidth = array.nbytes / seconds / 1e9
    return {
        "ok": not any(wrong),
        "comm": name,
        "bytes": array.nbytes,
        "dtype": config.dtype,
        "iterations": config.iterations * in_a_row,
        "ms": round(seconds * 1e3, 6),
        "algorithm_gb_per_s": round(bandwidth, 4),
        "bus_gb_per_s": round(bandwidth * 2 * (comm.size - 1) / comm.size, 4),
        "bytes_sent": (comm.bytes_sent - sent) // (config.iterations * in_a_row),
        "wrong": wrong,
    }


def _wrong(comm: Communicator, device: Device, count: int, dtype: str) -> int:
    """How many numbers of a sum are wrong. All are 0 or 1, so sums are exact in 16 bits, too."""
    pattern = device.xp.arange(count) % _PATTERN
    array = ((pattern + comm.rank) % 2).astype(_dtype(dtype))
    comm.allreduce(array)
    odd = comm.size // 2
    expected = device.xp.where(pattern % 2 == 0, odd, comm.size - odd)
    return int((array.astype("float64") != expected).sum())


def _count(nbytes: int, dtype: str) -> int:
    """Numbers in an array of about that size."""
    return max(1, nbytes // int(_dtype(dtype).itemsize))


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _words(record: Record) -> str:
    verdict = "right" if record["ok"] else f"WRONG: {max(record['wrong'])} numbers"
    speeds = f"algorithm {record['algorithm_gb_per_s']:8.3f} GB/s  bus {record['bus_gb_per_s']:8.3f} GB/s"
    return f"{record['bytes']:11} bytes  {record['comm']:12} {record['ms']:11.4f} ms  {speeds}  {verdict}"
