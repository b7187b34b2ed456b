"""Peak speed of a rank's processor, the reference for MFU (model FLOPs utilization)."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from payload.comm.base import Communicator
from payload.device.base import Device

# TFLOP/s of dense matrix products at boost clock, from NVIDIA's data sheets and architecture white
# papers. The first row whose words are all in the GPU's name applies. Half precision accumulates in
# float32. A precision is missing if the sheet has no figure for it, or if the hardware does not
# support it.
_SHEETS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H200 NVL", {"half": 835.5, "tf32": 417.5, "float32": 60.0, "float64": 60.0}),
    ("H200", {"half": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 66.9}),
    ("H100 PCIe", {"half": 756.0, "tf32": 378.0, "float32": 51.2, "float64": 51.2}),
    ("H100 NVL", {"half": 835.5, "tf32": 417.5, "float32": 60.0, "float64": 60.0}),
    ("H100", {"half": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 66.9}),
    ("A100", {"half": 312.0, "tf32": 156.0, "float32": 19.5, "float64": 19.5}),
    ("A30", {"half": 165.0, "tf32": 82.0, "float32": 10.3, "float64": 10.3}),
    ("A40", {"half": 149.7, "tf32": 74.8, "float32": 37.4}),
    ("A10", {"half": 125.0, "tf32": 62.5, "float32": 31.2}),
    ("L40S", {"half": 362.0, "tf32": 183.0, "float32": 91.6}),
    ("L40", {"half": 181.0, "tf32": 90.5, "float32": 90.5}),
    ("L4", {"half": 121.0, "tf32": 60.0, "float32": 30.3}),
    ("V100 SXM2", {"float16": 125.0, "float32": 15.7, "float64": 7.8}),
    ("V100", {"float16": 112.0, "float32": 14.0, "float64": 7.0}),
    ("T4", {"float16": 65.0, "float32": 8.1}),
    ("RTX 4090", {"half": 165.2, "tf32": 82.6, "float32": 82.6}),
    ("RTX 4070 Ti", {"half": 80.2, "tf32": 40.1, "float32": 40.1}),
    ("RTX 4070", {"half": 58.3, "tf32": 29.1, "float32": 29.1}),
    ("RTX 3090", {"half": 71.0, "tf32": 35.6, "float32": 35.6}),
)
_VARIANTS = {"Ti", "SUPER", "Laptop", "Max"}
"""Words in the names of consumer GPUs that distinguish chips."""

_EDGE = 512
_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class PeakSpeed:
    """A rank's peak speed with its source, or if the speed is unknown, the reason why it is
    unknown.
    """

    tflops: float | None
    source: str


def find_peak(
    device: Device, comm: Communicator, dtype: DTypeLike, fixed: float | None
) -> PeakSpeed:
    """Return this rank's peak speed: ``fixed`` if set, else from a GPU's data sheet or measured on
    the CPU.

    All ranks must call this function together, because CPUs are measured while all ranks compute.
    """
    if fixed is not None:
        return PeakSpeed(fixed, "--peak-tflops")
    if device.gpu is None:
        return _measured(device, comm, dtype)
    return _by_sheet(
        str(device.gpu["name"]), np.dtype(dtype).name, tf32=os.environ.get("CUPY_TF32") == "1"
    )


def _by_sheet(name: str, dtype: str, *, tf32: bool) -> PeakSpeed:
    words = set(name.replace("-", " ").split())
    if "MIG" in words:
        return PeakSpeed(
            None, f"{name} is a part of a GPU and has no data sheet; pass --peak-tflops"
        )
    precision = "tf32" if tf32 and dtype == "float32" else dtype
    for model, sheet in _SHEETS:
        if words >= set(model.split()) and not words & _VARIANTS - set(model.split()):
            tflops = sheet.get(precision)
            if tflops is None and precision in ("float16", "bfloat16"):
                tflops = sheet.get("half")
            sheet_name = f"NVIDIA's data sheet of the {model}, {precision}, dense"
            return PeakSpeed(
                tflops,
                sheet_name
                if tflops is not None
                else f"no figure in {sheet_name}; pass --peak-tflops",
            )
    return PeakSpeed(None, f"the data sheet of the {name} is not known; pass --peak-tflops")


def _measured(device: Device, comm: Communicator, dtype: DTypeLike) -> PeakSpeed:
    """Multiply matrices many times, and return the highest speed, because a CPU's clock may start
    low.

    NumPy computes 16-bit products in float32.
    """
    kind = np.promote_types(np.float32, dtype)
    matrix = device.xp.ones((_EDGE, _EDGE), kind)
    out = device.xp.empty_like(matrix)
    comm.barrier()
    best = math.inf
    total = 0.0
    while total < _SECONDS:
        began = time.perf_counter()
        device.matmul(matrix, matrix, out=out)
        seconds = time.perf_counter() - began
        best = min(best, seconds)
        total = total + seconds
    tflops = round(2 * _EDGE**3 / best / 1e12, 4)
    method = (
        f"the fastest product of {_EDGE}^3 in {kind.name} within {_SECONDS} s, all ranks at once"
    )
    return PeakSpeed(tflops, f"measured: {method}")
