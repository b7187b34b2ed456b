"""The start of MPI, and this process's rank.

This module does not import NumPy, because that would take most of the time of a short job, such as
the job with which `clusterctl up` tests MPI. MPI is finalized when the interpreter exits.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

import mpi4py

from payload.errors import LaunchError, PayloadError, line_of
from payload.node.host import hostname, launcher_rank, pmi_complaint, size_complaint

# Do not start MPI on import, because MPI ends the process if it cannot start.
mpi4py.rc(initialize=False, finalize=True)
from mpi4py import MPI  # noqa: E402

__all__ = ["MPI", "library", "local_rank", "start", "world_rank"]


def start(refusal: PayloadError | None = None) -> MPI.Intracomm:
    """Start MPI, and check that MPI has all ranks of the job. Call this before choosing a device.

    Afterwards an uncaught exception ends every rank of the job, so that no rank waits for a dead
    rank.

    Args:
        refusal: reason why this rank cannot continue, such as a missing file. Default: it can
            continue.

    Raises:
        PayloadError: the first ``refusal``, in order of rank. Raised on every rank.
        LaunchError: MPI sees another number of ranks than the launcher started, or cannot start.
    """
    complaint = pmi_complaint(library(), os.environ)
    if complaint:
        raise LaunchError(f"on {hostname()}: {complaint}")
    MPI.Init()
    sys.excepthook = _abort
    world = MPI.COMM_WORLD
    answers = world.allgather((refusal, size_complaint(world.size, os.environ)))
    for refusal_of_rank, _ in answers:
        if refusal_of_rank:
            raise refusal_of_rank
    complaints = [text for _, text in answers if text]
    if complaints:
        raise LaunchError(f"on {hostname()}: {complaints[0]}")
    return world


def library() -> str:
    """Return the name and version of the MPI library."""
    return str(MPI.Get_library_version()).splitlines()[0].split(",")[0].strip()


def world_rank() -> int:
    """Return this process's rank: from MPI, or from the launcher if MPI has not started."""
    return int(MPI.COMM_WORLD.rank) if MPI.Is_initialized() else launcher_rank(os.environ) or 0


def local_rank() -> int:
    """Return this process's index among the ranks of its node, starting at 0."""
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
