"""How ranks talk: one interface, transports, and compression around them.

``base`` is the interface, ``transport`` what all transports over MPI share, ``mpi`` the default one: begin
with its ``allreduce``. The others are in ``ring``, ``hierarchical`` and ``nccl``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from payload.errors import UsageError

if TYPE_CHECKING:
    from payload.comm.transport import Transport
    from payload.device.base import Device

_TRANSPORTS = {
    "mpi": ("mpi", "MpiCommunicator"),
    "mpi-cuda": ("mpi", "CudaAwareMpi"),
    "nccl": ("nccl", "Nccl"),
    "ring": ("ring", "Ring"),
    "hierarchical": ("hierarchical", "Hierarchical"),
    "naive": ("ring", "Naive"),
}
"""The module and the class of each, imported only when it is asked for: MPI is slow to load."""


def make_transport(name: str, device: Device, *, cuda_aware: bool = False) -> Transport:
    """The transport of that name between all ranks of the job.

    Args:
        cuda_aware: with ``mpi`` on a GPU, give MPI device memory as it is.

    Raises:
        UsageError: it does not work with this device, these ranks, or this MPI; on every rank.
    """
    if cuda_aware and not device.gpu:
        raise UsageError("--cuda-aware: there is no GPU whose memory MPI could be given", code="no-gpu")
    module, kind = _TRANSPORTS["mpi-cuda" if name == "mpi" and cuda_aware else name]
    return getattr(importlib.import_module(f"payload.comm.{module}"), kind)(device)
