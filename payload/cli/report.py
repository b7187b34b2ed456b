"""Code shared by commands: start MPI, choose each rank's device, and write results on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from payload.cli.config import PrecisionSettings
from payload.cli.jsonl import JsonLines, Keep, answer, print_line
from payload.comm import mpi, world
from payload.comm.base import Communicator, on_all_ranks
from payload.device import choose, fuse
from payload.device.base import Device
from payload.node.host import hostname


def begin(
    device_name: str, precision: PrecisionSettings | None = None
) -> tuple[mpi.MpiCommunicator, Device]:
    """Start MPI. Return the communicator of all ranks, and this rank's device.

    device_name: ``--device``. precision: names the kernels of layers. Default: plain.

    Raises UsageError on every rank if a device cannot be used, and LaunchError if the launcher and
    MPI disagree about the number of ranks.
    """
    ranks = mpi.start()
    device = on_all_ranks(ranks, lambda: choose(device_name, world.local_rank()))
    if precision and precision.kernels == "fused":
        on_all_ranks(ranks, lambda: fuse(device, deterministic=precision.deterministic))
    return ranks, device


def place(rank: int, device: Device) -> dict[str, Any]:
    """Return the number, host and GPU of this rank, as fields for a JSON object."""
    return {"rank": rank, "host": hostname(), "gpu": device.gpu}


class ResultWriter:
    """Writes results to a JSON Lines file, and prints lines on stdout. Only rank 0 writes and
    prints.
    """

    def __init__(self, world: Communicator, path: Path, *, keep: Keep | None = None) -> None:
        """Open the file on rank 0, as ``JsonLines`` does. Raises UsageError on every rank if that
        fails.
        """
        self._file = on_all_ranks(
            world, lambda: JsonLines(path, keep=keep) if world.rank == 0 else None
        )

    def write(self, kind: str, **fields: Any) -> None:
        if self._file:
            self._file.write(kind, **fields)

    def print_line(self, line: str) -> None:
        if self._file:
            print_line(line)

    def answer(self, **fields: Any) -> None:
        """Print the final result as a line of JSON."""
        if self._file:
            answer(**fields)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
