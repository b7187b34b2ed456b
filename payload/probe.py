"""Can all ranks reach each other, and do they add up right? One JSON object on stdout says so."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from payload.comm.base import Communicator
from payload.comm.mpi import MpiCommunicator
from payload.config import ProbeConfig
from payload.device import Device
from payload.host import own_cores
from payload.jsonl import answer
from payload.report import begin, place

SIZES = (1, 1_000, 131_072, 393_217)
"""Numbers in the arrays summed, 8 bytes each: the last one is three chunks and a bit."""

_PATTERN = 251
"""The arrays repeat after this many numbers: a prime, so that a misplaced chunk shows."""


def run(config: ProbeConfig) -> int:
    """Probe, print, and give the exit code: 0, or 1 if an answer is wrong or a host missing."""
    world, device = begin(config.device)
    found = probe(config, device, MpiCommunicator(device))
    if world.rank == 0:
        answer(**found)
        for failure in found["failures"]:
            sys.stderr.write(f"payload: probe failed: {_words(failure)}\n")
    return 0 if found["ok"] else 1


def probe(config: ProbeConfig, device: Device, comm: Communicator) -> dict[str, Any]:
    """Every rank's place, and what was found wrong on which; the same on all ranks."""
    ranks = comm.allgather({**place(comm.rank, device), "cores": own_cores()})
    hosts = [str(rank["host"]) for rank in ranks]

    started = time.perf_counter()
    wrong = [_wrong_sum(device, comm, size) for size in SIZES]
    seconds = time.perf_counter() - started
    wrong += _wrong_tokens(comm, hosts)

    failures: list[dict[str, Any]] = [
        {"rank": rank, "host": hosts[rank], "cause": cause}
        for rank, causes in enumerate(comm.allgather([cause for cause in wrong if cause]))
        for cause in causes
    ]
    failures += _missing(config.expect_hosts, hosts)
    return {
        "ok": not failures,
        "world_size": comm.size,
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": ranks,
        "allreduce": {"bytes": [8 * size for size in SIZES], "seconds": seconds},
        "pairs": comm.size * (comm.size - 1) // 2,
        "failures": failures,
    }


def _wrong_sum(device: Device, comm: Communicator, size: int) -> str | None:
    """Sum whole numbers, which float64 does exactly, and compare with the sum by formula."""
    pattern = device.xp.arange(size, dtype="float64") % _PATTERN + 1
    array = pattern * (comm.rank + 1)
    comm.allreduce(array)
    expected = pattern * (comm.size * (comm.size + 1) // 2)
    count = int((array != expected).sum())
    return f"allreduce of {8 * size} bytes: {count} of {size} sums are wrong" if count else None


def _wrong_tokens(comm: Communicator, hosts: Sequence[str]) -> list[str]:
    """Every rank sends to every other, in turn, and says what did not arrive as it was sent."""
    wrong = []
    for distance in range(1, comm.size):
        dest, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        token = comm.exchange((comm.rank, dest), dest, source)
        if token != (source, comm.rank):
            wrong.append(f"got {token!r} instead of the token of rank {source} on {hosts[source]}")
    return wrong


def _missing(expected: Sequence[str], hosts: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"rank": None, "host": host, "cause": "no rank runs there"} for host in expected if host not in hosts
    ]


def _words(failure: dict[str, Any]) -> str:
    who = failure["host"] if failure["rank"] is None else f"rank {failure['rank']} on {failure['host']}"
    return f"{who}: {failure['cause']}"
