"""Communication between ranks: an interface, several transports, and compression on top of them.

Start reading at ``allreduce`` in ``mpi``, the default transport. The interface is in ``base``; the
code shared by all transports over MPI is in ``transport``.
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
"""Module and class of each transport. Imported on demand, because MPI is slow to load."""


def make_transport(name: str, device: Device, *, cuda_aware: bool = False) -> Transport:
    """Return the named transport between all ranks of the job.

    cuda_aware: whether ``mpi`` passes GPU memory directly to MPI. Raises UsageError, on every rank,
    if the transport does not work with this device, MPI or set of ranks.
    """
    if cuda_aware and not device.gpu:
        raise UsageError("--cuda-aware: this rank uses no GPU; omit --cuda-aware", code="no-gpu")
    module, kind = _TRANSPORTS["mpi-cuda" if name == "mpi" and cuda_aware else name]
    return getattr(importlib.import_module(f"payload.comm.{module}"), kind)(device)
