"""Can all ranks reach each other, and do they add up right? One JSON object on stdout says so.

Without NumPy and the other commands' settings, whose import takes longer than all of this: on a local cluster
the ranks of many nodes share cores.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from payload.cli.jsonl import answer
from payload.comm.world import MPI, start, world_rank
from payload.errors import PayloadError
from payload.node.host import hostname, own_cores

if TYPE_CHECKING:
    from payload.cli.config import ProbeConfig

SIZES = (1, 1_000, 131_072, 393_217)
"""Numbers in the arrays summed, 8 bytes each: the last one is three chunks and a bit."""

_PATTERN = array("d", range(1, 252))
"""The arrays repeat it: it has a prime number of numbers, so that a misplaced chunk shows."""


def run(config: ProbeConfig) -> int:
    """Probe, print, and give the exit code: 0, or 1 if an answer is wrong or a host missing."""
    return _run(config.expect_hosts)


def _run(expected: Sequence[str]) -> int:
    world = start()
    found = probe(expected, world)
    if world.rank == 0:
        answer(**found)
        for failure in found["failures"]:
            sys.stderr.write(f"payload: probe failed: {_words(failure)}\n")
    return 0 if found["ok"] else 1


def probe(expected: Sequence[str], comm: MPI.Intracomm) -> dict[str, Any]:
    """Every rank's place, and what was found wrong on which; the same on all ranks.

    Args:
        expected: hosts of which each must have a rank.
    """
    ranks = comm.allgather({"rank": comm.rank, "host": hostname(), "cores": own_cores()})
    hosts = [str(rank["host"]) for rank in ranks]

    started = time.perf_counter()
    wrong = [_wrong_sum(comm, size) for size in SIZES]
    seconds = time.perf_counter() - started
    wrong += _wrong_tokens(comm, hosts)

    failures: list[dict[str, Any]] = [
        {"rank": rank, "host": hosts[rank], "cause": cause}
        for rank, causes in enumerate(comm.allgather([cause for cause in wrong if cause]))
        for cause in causes
    ]
    failures += [
        {"rank": None, "host": host, "cause": "no rank runs there"} for host in expected if host not in hosts
    ]
    return {
        "ok": not failures,
        "world_size": comm.size,
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": ranks,
        "allreduce": {"bytes": [8 * size for size in SIZES], "seconds": seconds},
        "pairs": comm.size * (comm.size - 1) // 2,
        "failures": failures,
    }


def _wrong_sum(comm: MPI.Intracomm, size: int) -> str | None:
    """Sum whole numbers, which float64 does exactly, and compare with the sum by formula."""
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
    """Every rank sends to every other, in turn, and says what did not arrive as it was sent."""
    wrong = []
    for distance in range(1, comm.size):
        dest, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        token = comm.sendrecv((comm.rank, dest), dest=dest, source=source)
        if token != (source, comm.rank):
            wrong.append(f"got {token!r} instead of the token of rank {source} on {hosts[source]}")
    return wrong


def _words(failure: dict[str, Any]) -> str:
    where = failure["host"] if failure["rank"] is None else f"rank {failure['rank']} on {failure['host']}"
    return f"{where}: {failure['cause']}"


def main(expected: str) -> None:
    """Probe as the verification of a cluster does, and end; ``expected``: hosts, separated by commas."""
    try:
        sys.exit(_run(expected.split(",")))
    except PayloadError as exc:
        sys.exit(f"payload: error: {exc}" if world_rank() == 0 else exc.exit_code)
