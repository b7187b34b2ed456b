"""Benchmark of sums over ranks, by array size and transport. A sum of each size is checked first.

The results are as in nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): if the sum of S bytes on n
ranks takes t seconds, the algorithm bandwidth is S / t, and the bus bandwidth is S / t · 2 (n - 1)
/ n. The bus bandwidth does not depend on n if the slowest link is always busy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from payload.cli.config import AllreduceConfig
from payload.cli.report import ResultWriter, begin, place
from payload.comm import make_transport
from payload.comm.base import Communicator
from payload.device.base import Device

Record = dict[str, Any]

_GROWTH = 4
"""Factor from one size to the next."""

_IN_A_ROW_BYTES = 1 << 20
"""Small sums are timed in batches of this size, because a single sum is shorter than a barrier's
skew.
"""

_MOST_IN_A_ROW = 256
"""Maximum number of sums in a batch."""

_PATTERN = 251
"""Period of the summed numbers. A prime, so that a misplaced piece gives a wrong sum."""


def run(config: AllreduceConfig) -> int:
    """Check and measure sums, and print the results. Return the exit code: 1 if a sum is wrong,
    else 0.
    """
    world, device = begin(config.device)
    comms = {
        name: make_transport(name, device, cuda_aware=config.cuda_aware) for name in config.comm
    }
    return 0 if allreduce(config, device, world, comms) else 1


def allreduce(
    config: AllreduceConfig, device: Device, world: Communicator, comms: Mapping[str, Communicator]
) -> bool:
    """Measure sums of arrays of all sizes over all ``comms`` (by transport). Return whether all are
    right.
    """
    report = ResultWriter(world, config.out / "allreduce.jsonl")
    places = world.allgather(place(world.rank, device))
    records = []
    nbytes_to_measure = sizes(config.min, config.max)
    # Different small sizes may round to the same number of elements.
    for count in dict.fromkeys(_count(nbytes, config.dtype) for nbytes in nbytes_to_measure):
        for name, comm in comms.items():
            record = _measure(name, comm, device, count, config)
            records.append(record)
            report.write("allreduce", **record)
            report.print_line(_line_of(record))
    ok = all(record["ok"] for record in records)
    report.answer(ok=ok, world_size=world.size, ranks=places, results=records)
    report.close()
    return ok


def sizes(smallest: int, largest: int) -> list[int]:
    """Return sizes in bytes that grow from ``smallest`` by a factor of 4. The last size is
    ``largest``.
    """
    growing = []
    while smallest < largest:
        growing.append(smallest)
        smallest *= _GROWTH
    return [*growing, largest]


def _measure(
    name: str, comm: Communicator, device: Device, count: int, config: AllreduceConfig
) -> Record:
    """Sum arrays of ``count`` numbers. Return the speed, and whether the sums are right on all
    ranks.
    """
    wrong = comm.allgather(_wrong(comm, device, count, config.dtype))
    array = device.xp.zeros(count, _dtype(config.dtype))
    in_a_row = min(max(1, _IN_A_ROW_BYTES // array.nbytes), _MOST_IN_A_ROW)
    durations = []
    sent_before = comm.bytes_sent
    for _ in range(config.iterations):
        comm.barrier()
        device.synchronize()
        began = time.perf_counter()
        for _ in range(in_a_row):
            comm.allreduce(array)
        device.synchronize()
        durations.append((time.perf_counter() - began) / in_a_row)
    seconds = max(comm.allgather(statistics.median(durations)))
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
        "bytes_sent": (comm.bytes_sent - sent_before) // (config.iterations * in_a_row),
        "wrong": wrong,
    }


def _wrong(comm: Communicator, device: Device, count: int, dtype: str) -> int:
    """Sum arrays of 0 and 1, which is exact even in 16 bits. Return how many numbers of the sum are
    wrong.
    """
    pattern = device.xp.arange(count) % _PATTERN
    array = ((pattern + comm.rank) % 2).astype(_dtype(dtype))
    comm.allreduce(array)
    odd = comm.size // 2
    expected = device.xp.where(pattern % 2 == 0, odd, comm.size - odd)
    return int((array.astype("float64") != expected).sum())


def _count(nbytes: int, dtype: str) -> int:
    return max(1, nbytes // int(_dtype(dtype).itemsize))


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _line_of(record: Record) -> str:
    verdict = "right" if record["ok"] else f"WRONG: {max(record['wrong'])} numbers"
    speeds = (
        f"algorithm {record['algorithm_gb_per_s']:8.3f} GB/s  bus {record['bus_gb_per_s']:8.3f} "
        "GB/s"
    )
    return (
        f"{record['bytes']:11} bytes  {record['comm']:12} {record['ms']:11.4f} ms  {speeds}  "
        f"{verdict}"
    )
