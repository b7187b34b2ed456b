"""The start of MPI, and what a rank knows of its world. No NumPy: all nodes' verification loads this first.

MPI is finalised when the interpreter exits.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

import mpi4py

from payload.errors import LaunchError, PayloadError, line_of
from payload.node.host import hostname, launcher_rank, pmi_complaint, size_complaint

mpi4py.rc(initialize=False, finalize=True)  # not on import: where MPI cannot start, it ends the process
from mpi4py import MPI  # noqa: E402

__all__ = ["MPI", "library", "local_rank", "start", "world_rank"]


def start(refusal: PayloadError | None = None) -> MPI.Intracomm:
    """Join the world, before a device is chosen, and make sure that it is the whole one.

    From here on an uncaught exception ends every rank of the job, so that none waits for a dead one.

    Args:
        refusal: why this rank cannot go on, such as a file that it alone lacks.

    Raises:
        PayloadError: the ``refusal`` of the lowest rank that has one, on every rank.
        LaunchError: the launcher started another number of ranks than MPI sees, or MPI cannot start under it.
    """
    complaint = pmi_complaint(library(), os.environ)
    if complaint:
        raise LaunchError(f"on {hostname()}: {complaint}")
    MPI.Init()
    sys.excepthook = _abort
    world = MPI.COMM_WORLD
    known = world.allgather((refusal, size_complaint(world.size, os.environ)))
    for refused, _ in known:
        if refused:
            raise refused
    complaints = [text for _, text in known if text]
    if complaints:
        raise LaunchError(f"on {hostname()}: {complaints[0]}")
    return world


def library() -> str:
    """MPI's name and version."""
    return str(MPI.Get_library_version()).splitlines()[0].split(",")[0].strip()


def world_rank() -> int:
    """This process's rank; the launcher's word for it if MPI did not start."""
    return int(MPI.COMM_WORLD.rank) if MPI.Is_initialized() else launcher_rank(os.environ) or 0


def local_rank() -> int:
    """This process's place among the ranks of its node, from 0."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank = int(node.rank)
    node.Free()
    return rank


def _abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    rank = f"rank {MPI.COMM_WORLD.rank} on {hostname()}"
    line = line_of(error)
    if line is not None:
        sys.stderr.write(f"payload: error: {rank}: {line}\n")
    else:
        sys.stderr.write(f"{rank} aborts the job:\n")
        sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
