"""The lock of GPU wheels has CuPy and the libraries that it loads."""

from __future__ import annotations

from clusterctl.packages.wheelhouse import pins
from clusterctl.util.assets import gpu_lock, job_lock

_CUDA = "cublas cuda-nvrtc cuda-runtime cufft curand cusolver cusparse nccl nvjitlink".split()


def test_gpu_lock_has_every_library_that_cupy_loads() -> None:
    named = pins(gpu_lock())
    assert {"cupy-cuda12x", "nvidia-ml-py", *(f"nvidia-{name}-cu12" for name in _CUDA)} <= set(
        named
    )
    assert named["nvidia-cuda-nvrtc-cu12"].startswith("12.")
    assert not named.keys() & pins(job_lock()).keys()
