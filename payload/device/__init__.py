"""Choice between NumPy and CuPy. Code outside this package calls either module as ``device.xp``."""

from __future__ import annotations

import os
from pathlib import Path

from payload.device.base import CpuDevice, Device
from payload.device.gpu import GpuDevice
from payload.errors import UsageError


def choose(requested: str, local_rank: int) -> Device:
    """Return the device for a rank. If a node has more ranks than GPUs, ranks share GPUs.

    Args:
        requested: ``cpu``, ``gpu``, or ``auto`` (a GPU if CuPy finds a GPU). Without a usable GPU,
            ``gpu`` raises UsageError.
        local_rank: index of the rank on its node.
    """
    if requested == "cpu":
        return CpuDevice()
    _select_own_mig_part(local_rank)
    try:
        import cupy
    except ImportError as exc:
        return _without_gpu(requested, f"CuPy cannot be imported: {exc}", exc)
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        return _without_gpu(requested, f"CUDA cannot be used: {exc}", exc)
    if not count:
        return _without_gpu(requested, "CUDA finds no GPU")
    try:
        return GpuDevice(cupy, local_rank % count)
    except ImportError as exc:
        return _without_gpu(requested, f"CuPy cannot load cuBLAS: {exc}", exc)


def fuse(device: Device, *, deterministic: bool) -> None:
    """Let a GPU compute 16-bit layers by cuDNN and cuBLASLt. deterministic: only by algorithms with
    bit-identical results.

    Raises UsageError if the device is no GPU, or lacks the libraries.
    """
    if not isinstance(device, GpuDevice):
        raise UsageError(
            "--kernels fused: this rank has no GPU; use --kernels plain", code="no-gpu"
        )
    try:
        import cudnn
        from nvmath.bindings import cublasLt

        device.fuse(cudnn, cublasLt, deterministic=deterministic)
    # The libraries raise errors of many kinds if CUDA's libraries are missing or do not fit.
    except Exception as exc:
        raise UsageError(
            f"--kernels fused: cuDNN or cuBLASLt cannot be used: {exc}; install payload/"
            "requirements-fused.in, or use --kernels plain",
            code="kernels-missing",
        ) from exc


def _select_own_mig_part(local_rank: int) -> None:
    """Hide all MIG parts of GPUs but this rank's from CUDA, because CUDA uses only the first that
    it sees.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(visible) > 1 and all(name.startswith("MIG-") for name in visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)]


def _without_gpu(requested: str, reason: str, cause: Exception | None = None) -> CpuDevice:
    if requested == "gpu":
        hint = (
            "check that nvidia-smi lists a GPU on the node, and that the job requests one "
            "(submit --gpus 1)"
        )
        raise UsageError(f"--device gpu: {reason}; {hint}", code="no-gpu") from cause
    # On a node without a GPU there is nothing to report.
    return CpuDevice(
        f"the node's GPU is not used: {reason}" if Path("/dev/nvidia0").exists() else ""
    )
