"""What commands do alike: start MPI and choose the device on all ranks, and have rank 0 tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from payload.cli.jsonl import JsonLines, Keep, answer, print_line
from payload.comm import mpi, world
from payload.comm.base import Communicator, on_all_ranks
from payload.device import choose
from payload.device.base import Device
from payload.node.host import hostname


def begin(wanted: str) -> tuple[mpi.MpiCommunicator, Device]:
    """The ranks of this job, and this rank's device.

    Raises:
        UsageError: there is no such device; on every rank.
        LaunchError: the launcher and MPI disagree about the number of ranks.
    """
    ranks = mpi.start()
    return ranks, on_all_ranks(ranks, lambda: choose(wanted, world.local_rank()))


def place(rank: int, device: Device) -> dict[str, Any]:
    """Where a rank is."""
    return {"rank": rank, "host": hostname(), "gpu": device.gpu}


class Report:
    """A file of records, and lines for people, by rank 0."""

    def __init__(self, world: Communicator, path: Path, *, keep: Keep | None = None) -> None:
        """``keep``: as of ``JsonLines``.

        Raises:
            UsageError: the file cannot be written; on every rank.
        """
        self._file = on_all_ranks(world, lambda: JsonLines(path, keep=keep) if world.rank == 0 else None)

    def write(self, kind: str, **fields: Any) -> None:
        """Add one object to the file."""
        if self._file:
            self._file.write(kind, **fields)

    def print_line(self, line: str) -> None:
        """Print a line."""
        if self._file:
            print_line(line)

    def answer(self, **fields: Any) -> None:
        """Print what it all comes to."""
        if self._file:
            answer(**fields)
