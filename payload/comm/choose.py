"""Transports and compressors by the names that users give them."""

from __future__ import annotations

import importlib

from payload.comm.compressed import Compressed
from payload.comm.transport import MPI, Transport
from payload.device import Device
from payload.errors import UsageError

_CLASSES = {
    "mpi": "payload.comm.mpi.MpiCommunicator",
    "mpi-cuda": "payload.comm.cuda_aware.CudaAwareMpi",
    "nccl": "payload.comm.nccl.Nccl",
    "ring": "payload.comm.ring.Ring",
    "hierarchical": "payload.comm.hierarchical.Hierarchical",
    "naive": "payload.comm.naive.Naive",
    "topk": "payload.comm.topk.TopK",
    "int8": "payload.comm.int8.Int8",
    "powersgd": "payload.comm.powersgd.PowerSGD",
}


def make(name: str, device: Device, comm: MPI.Comm | None = None, *, cuda_aware: bool = False) -> Transport:
    """The transport of that name, by default between all ranks of the job.

    Args:
        cuda_aware: with ``mpi`` on a GPU, give MPI device memory as it is.

    Raises:
        UsageError: it does not work with this device, these ranks, or this MPI; on every rank.
    """
    if cuda_aware and not device.gpu:
        raise UsageError("--cuda-aware: there is no GPU whose memory MPI could be given")
    wanted = "mpi-cuda" if name == "mpi" and cuda_aware else name
    transport: Transport = _find(wanted)(device, comm)
    return transport


def compress(name: str, transport: Transport, **options: float) -> Compressed:
    """A transport that compresses sums of gradients, once they are attached.

    Args:
        options: ``ratio`` for ``topk``, ``rank`` for ``powersgd``.
    """
    compressed: Compressed = _find(name)(transport, **options)
    return compressed


def _find(name: str) -> type:
    module, _, attribute = _CLASSES[name].rpartition(".")
    found: type = getattr(importlib.import_module(module), attribute)
    return found
