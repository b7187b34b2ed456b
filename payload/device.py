"""The one place that knows NumPy from CuPy: everything else computes with ``device.xp``.

MPI is never given device memory, since that crashes where MPI was built without CUDA: arrays of a GPU are
staged through pinned host memory, which the GPU copies at full speed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from payload.errors import UsageError

Array = NDArray[Any]
"""NumPy's array or CuPy's, which has the same methods."""

GpuFacts = dict[str, str | int | None]
"""index, name and uuid"""


class Device(Protocol):
    """Where arrays live and are computed with."""

    xp: ModuleType
    """numpy or cupy"""
    gpu: GpuFacts | None
    """None on a CPU"""
    note: str
    """why it is this one, in words"""

    def asarray(self, host: Array, dtype: DTypeLike | None = None) -> Array:
        """A host array, on the device."""

    def to_host(self, array: Array) -> Array:
        """A device array, on the host; valid until the next call with an array of that size and dtype."""

    def from_host(self, host: Array, array: Array) -> None:
        """Write what ``to_host`` gave, and the caller changed, back to its array."""


class Cpu:
    """NumPy: host and device memory are the same."""

    xp: ModuleType = np
    gpu: GpuFacts | None = None

    def __init__(self, note: str = "asked for") -> None:
        self.note = note

    def asarray(self, host: Array, dtype: DTypeLike | None = None) -> Array:
        return np.asarray(host, dtype=dtype)

    def to_host(self, array: Array) -> Array:
        return array

    def from_host(self, host: Array, array: Array) -> None:
        if host is not array:
            np.copyto(array, host)


class Gpu:
    """CuPy on one of the node's GPUs."""

    def __init__(self, cupy: ModuleType, index: int) -> None:
        self.xp = cupy
        self.note = "CuPy found it"
        cupy.cuda.Device(index).use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.gpu: GpuFacts | None = {
            "index": index,
            "name": properties["name"].decode(),
            "uuid": _uuid(properties.get("uuid", b"")),
        }
        self._empty_pinned = importlib.import_module("cupyx").empty_pinned
        self._staging: dict[tuple[int, str], Array] = {}

    def asarray(self, host: Array, dtype: DTypeLike | None = None) -> Array:
        array: Array = self.xp.asarray(host, dtype=dtype)
        return array

    def to_host(self, array: Array) -> Array:
        key = (array.size, array.dtype.str)
        if key not in self._staging:
            self._staging[key] = self._empty_pinned(array.size, array.dtype)
        host = self._staging[key].reshape(array.shape)
        device_array: Any = array
        device_array.get(out=host)
        return host

    def from_host(self, host: Array, array: Array) -> None:
        # May still be under way on return; the stream lets no later copy into ``host`` overtake it.
        device_array: Any = array
        device_array.set(host)


def choose(wanted: str, local_rank: int) -> Device:
    """The device for the ``local_rank``-th rank of this node; ranks share GPUs in turn if there are fewer.

    Args:
        wanted: ``cpu``, ``gpu``, or ``auto`` for a GPU where CuPy finds one.

    Raises:
        UsageError: ``gpu`` was asked for and cannot be had.
    """
    if wanted == "cpu":
        return Cpu()
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as exc:
        return _without_gpu(wanted, f"no CuPy: {exc}", exc)
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        return _without_gpu(wanted, f"no GPU: {exc}", exc)
    return Gpu(cupy, local_rank % count) if count else _without_gpu(wanted, "CUDA counts no GPU")


def _without_gpu(wanted: str, why: str, cause: Exception | None = None) -> Cpu:
    if wanted == "gpu":
        raise UsageError(f"--device gpu: {why}") from cause
    # Where there is no GPU, nobody misses it.
    return Cpu(f"a GPU is here but not used: {why}" if Path("/dev/nvidia0").exists() else "")


def _uuid(raw: bytes) -> str | None:
    """In the form nvidia-smi and Slurm print; None where its 16 bytes were cut at a zero."""
    if len(raw) < 16:  # noqa: PLR2004
        return None
    digits = raw[:16].hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
