"""Code shared by commands: start MPI and choose the device on all ranks, and report from rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from payload.cli.jsonl import JsonLines, Keep, answer, print_line
from payload.comm import mpi, world
from payload.comm.base import Communicator, on_all_ranks
from payload.device import choose
from payload.device.base import Device
from payload.node.host import hostname


def begin(device_name: str) -> tuple[mpi.MpiCommunicator, Device]:
    """Start MPI, and choose this rank's device.

    Returns:
        The communicator of all ranks, and this rank's device.

    Raises:
        UsageError: the device cannot be used. Raised on every rank.
        LaunchError: the launcher and MPI disagree about the number of ranks.
    """
    ranks = mpi.start()
    return ranks, on_all_ranks(ranks, lambda: choose(device_name, world.local_rank()))


def place(rank: int, device: Device) -> dict[str, Any]:
    """Return a rank's number, host and GPU."""
    return {"rank": rank, "host": hostname(), "gpu": device.gpu}


class Report:
    """A file of records and printed lines. Only rank 0 writes and prints."""

    def __init__(self, world: Communicator, path: Path, *, keep: Keep | None = None) -> None:
        """Open the file. keep: see ``JsonLines``.

        Raises:
            UsageError: the file cannot be written. Raised on every rank.
        """
        self._file = on_all_ranks(world, lambda: JsonLines(path, keep=keep) if world.rank == 0 else None)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one object to the file."""
        if self._file:
            self._file.write(kind, **fields)

    def print_line(self, line: str) -> None:
        """Print a line."""
        if self._file:
            print_line(line)

    def answer(self, **fields: Any) -> None:
        """Print the final result as one JSON object."""
        if self._file:
            answer(**fields)
