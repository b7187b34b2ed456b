"""Communication between ranks: an interface, several transports, and compression on top of them.

Start reading at ``allreduce`` in ``mpi``, the default transport. The interface is in ``base``; the
code shared by all transports over MPI is in ``transport``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from payload.errors import UsageError

if TYPE_CHECKING:
    from payload.comm.transport import MpiTransport
    from payload.device.base import Device


def make_transport(name: str, device: Device, *, cuda_aware: bool = False) -> MpiTransport:
    """Return the named transport between all ranks of the job.

    cuda_aware: whether ``mpi`` passes GPU memory directly to MPI. Raises UsageError, on every rank,
    if the transport does not work with this device, MPI or set of ranks.
    """
    if cuda_aware and not device.gpu:
        raise UsageError("--cuda-aware: this rank uses no GPU; omit --cuda-aware", code="no-gpu")
    # Only the named transport is imported, because MPI is slow to load.
    match name:
        case "mpi" if cuda_aware:
            from payload.comm.mpi import CudaAwareMpi

            return CudaAwareMpi(device)
        case "mpi":
            from payload.comm.mpi import MpiCommunicator

            return MpiCommunicator(device)
        case "nccl":
            from payload.comm.nccl import Nccl

            return Nccl(device)
        case "ring":
            from payload.comm.ring import Ring

            return Ring(device)
        case "hierarchical":
            from payload.comm.hierarchical import Hierarchical

            return Hierarchical(device)
        case "naive":
            from payload.comm.ring import Naive

            return Naive(device)
        case _:
            raise LookupError(name)
