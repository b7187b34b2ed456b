"""Runs in which one rank differs from the other ranks.

mpirun -n 2 python faults.py NAME ...    the name of one of these functions, and its arguments
"""

import errno
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

from payload.__main__ import main
from payload.checkpoint import saver
from payload.comm import mpi
from payload.device.base import Array

RANK, SIZE = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
LAST = RANK == SIZE - 1


def breaks(victim: str) -> None:
    """One rank raises an exception while the other ranks wait for it."""
    comm = mpi.start()
    if comm.rank == int(victim):
        raise ZeroDivisionError("this rank breaks")
    comm.allgather(None)


def is_late() -> int:
    """All ranks have a wrong command line, and rank 0 is the last to start."""
    if RANK == 0:
        time.sleep(1.5)
    return main(["train", "--lr", "fast"])


def lacks_the_config(folder: str) -> int:
    file = Path(folder) / ("missing.toml" if LAST else "mine.toml")
    if not LAST:
        file.write_text("[batch]\niterations = 2\n")
    return main(["train", "--config", str(file), "--out", folder])


def has_its_own_folder(folder: str) -> int:
    return main(
        ["train", "--save-interval", "1", "--checkpoints", f"{folder}/{RANK}", "--out", folder]
    )


def drifts(folder: str) -> int:
    """Sums come out a little different on the last rank."""

    class Drifting(mpi.MpiCommunicator):
        def allreduce(self, array: Array) -> None:
            super().allreduce(array)
            if LAST:
                array *= 1 + 1e-12

    with patch.object(mpi, "MpiCommunicator", Drifting):
        return main(["train", "--iterations", "2", "--precision", "fp64", "--out", folder])


def cannot_write(folder: str) -> int:
    """The last rank cannot write its part of a checkpoint."""

    def write(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    with patch.object(saver, "write", write if LAST else saver.write):
        return main(["train", "--save-interval", "2", "--out", folder])


sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
