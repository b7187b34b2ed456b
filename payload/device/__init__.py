"""NumPy or CuPy: the only place that distinguishes the two. Everything else computes with ``device.xp``."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from payload.device.base import Cpu, Device
from payload.device.gpu import Gpu
from payload.errors import UsageError


def choose(wanted: str, local_rank: int) -> Device:
    """The device for the ``local_rank``-th rank of this node; ranks share GPUs in turn if there are fewer.

    Args:
        wanted: ``cpu``, ``gpu``, or ``auto`` for a GPU where CuPy finds one.

    Raises:
        UsageError: ``gpu`` was asked for and cannot be had.
    """
    if wanted == "cpu":
        return Cpu()
    _take_own_part(local_rank)
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as exc:
        return _without_gpu(wanted, f"no CuPy: {exc}", exc)
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        return _without_gpu(wanted, f"no GPU: {exc}", exc)
    if not count:
        return _without_gpu(wanted, "CUDA counts no GPU")
    try:
        return Gpu(cupy, local_rank % count)
    except ImportError as exc:
        return _without_gpu(wanted, f"CuPy finds no cuBLAS: {exc}", exc)


def _take_own_part(local_rank: int) -> None:
    """Of several parts of GPUs (MIG) CUDA shows a process the first alone: each rank names its own to it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(visible) > 1 and all(name.startswith("MIG-") for name in visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)]


def _without_gpu(wanted: str, why: str, cause: Exception | None = None) -> Cpu:
    if wanted == "gpu":
        ask = "see that nvidia-smi shows one there, and that the job asks for it (submit --gpus 1)"
        raise UsageError(f"--device gpu: {why}; {ask}", code="no-gpu") from cause
    # Where there is no GPU, nobody misses it.
    return Cpu(f"a GPU is here but not used: {why}" if Path("/dev/nvidia0").exists() else "")
