"""Checks that all ranks can communicate, and that their sums are right, and prints the result as
JSON.

This module does not import NumPy or the settings of other commands, because such imports take
longer than the
check: on a local cluster, the ranks of many nodes share cores.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from payload.cli.jsonl import answer
from payload.comm.link import measure
from payload.comm.world import MPI, start, world_rank
from payload.errors import PayloadError
from payload.node.host import hostname, own_cores

if TYPE_CHECKING:
    from payload.cli.config import ProbeConfig

SIZES = (1, 1_000, 131_072, 393_217)
"""Lengths of the arrays that are summed, 8 bytes per number. The last is just over three chunks."""

_PATTERN = array("d", range(1, 252))
"""The arrays repeat this pattern. Its length is prime, so that a misplaced chunk is noticed."""


def run(config: ProbeConfig) -> int:
    """Check all ranks, and print the result. Return the exit code: 1 if a check fails, else 0."""
    return _run(config.expect_hosts)


def _run(expected: Sequence[str]) -> int:
    world = start()
    result = probe(expected, world)
    if world.rank == 0:
        answer(**result)
        for failure in result["failures"]:
            sys.stderr.write(f"payload: probe failed: {_line_of(failure)}\n")
    return 0 if result["ok"] else 1


def probe(expected: Sequence[str], comm: MPI.Intracomm) -> dict[str, Any]:
    """Check communication between all ranks. Return, on all ranks, their hosts, cores and C libraries
    (such as `glibc 2.36`), and all failures.

    expected: hosts that must run a rank.
    """
    ranks = comm.allgather(
        {
            "rank": comm.rank,
            "host": hostname(),
            "cores": own_cores(),
            "glibc": os.confstr("CS_GNU_LIBC_VERSION"),
        }
    )
    hosts = [str(rank["host"]) for rank in ranks]

    started = time.perf_counter()
    causes_here = [_wrong_sum(comm, size) for size in SIZES]
    seconds = time.perf_counter() - started
    causes_here += _wrong_tokens(comm, hosts)

    failures: list[dict[str, Any]] = [
        {"rank": rank, "host": hosts[rank], "cause": cause}
        for rank, causes in enumerate(comm.allgather([cause for cause in causes_here if cause]))
        for cause in causes
    ]
    failures += [
        {"rank": None, "host": host, "cause": "no rank runs on this host"}
        for host in expected
        if host not in hosts
    ]
    return {
        "ok": not failures,
        "world_size": comm.size,
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": ranks,
        "allreduce": {"bytes": [8 * size for size in SIZES], "seconds": seconds},
        "link": measure(comm, hosts),
        "pairs": comm.size * (comm.size - 1) // 2,
        "failures": failures,
    }


def _wrong_sum(comm: MPI.Intracomm, size: int) -> str | None:
    """Sum an array of ``size`` integers over all ranks. Return an error message if a sum is
    wrong.
    """
    numbers = _repeated(comm.rank + 1, size)
    comm.Allreduce(MPI.IN_PLACE, numbers)
    expected = _repeated(comm.size * (comm.size + 1) // 2, size)
    if numbers == expected:
        return None
    count = sum(map(float.__ne__, numbers, expected))
    return f"allreduce of {8 * size} bytes: {count} of {size} sums are wrong"


def _repeated(factor: int, size: int) -> array[float]:
    times = -(-size // len(_PATTERN))
    return (array("d", [factor * number for number in _PATTERN]) * times)[:size]


def _wrong_tokens(comm: MPI.Intracomm, hosts: Sequence[str]) -> list[str]:
    """Exchange a message with each other rank, and return an error text for each wrong message."""
    wrong = []
    for distance in range(1, comm.size):
        dest = (comm.rank + distance) % comm.size
        source = (comm.rank - distance) % comm.size
        token = comm.sendrecv((comm.rank, dest), dest=dest, source=source)
        if token != (source, comm.rank):
            wrong.append(f"got {token!r} instead of the token of rank {source} on {hosts[source]}")
    return wrong


def _line_of(failure: dict[str, Any]) -> str:
    place = (
        failure["host"]
        if failure["rank"] is None
        else f"rank {failure['rank']} on {failure['host']}"
    )
    return f"{place}: {failure['cause']}"


def main(expected: str) -> None:
    """Check all ranks for ``clusterctl``'s verification of a cluster, and exit.

    expected: hosts that must run a rank, separated by commas.
    """
    try:
        sys.exit(_run(expected.split(",")))
    except PayloadError as exc:
        sys.exit(f"payload: error: {exc}" if world_rank() == 0 else exc.exit_code)
