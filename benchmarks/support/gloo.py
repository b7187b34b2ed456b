"""PyTorch's process group over gloo, on the ranks that MPI has started."""

from __future__ import annotations

import socket
import sys

from torch import distributed

from payload.comm.mpi import MpiCommunicator


def join(world: MpiCommunicator) -> None:
    """Join the process group; an uncaught exception still ends all ranks, with its traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = world.allgather(probe.getsockname()[1])[0]
    hook = sys.excepthook
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size
    )
    # PyTorch's own hook shows a traceback only after the hook before it has returned: MPI's never
    # returns.
    sys.excepthook = hook
