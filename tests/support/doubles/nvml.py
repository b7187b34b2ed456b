# ruff: noqa: N802 - the functions are those of NVML
"""A double of libnvidia-ml.so.1, NVIDIA's NVML, for the real pynvml: GPUs that a test describes.

It refuses what NVML refuses, with the codes of nvml.h (as DCGM 4.6.0 ships it in sdk/nvidia/nvml). A
counter (GPM) of two samples that are less than 0.1 s apart is NaN, and each counter has a code of its
own: DCGM's DcgmGpmManager.cpp looks at both. A function that an older driver lacks is missing, which
pynvml calls FUNCTION_NOT_FOUND.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

from payload.node import nvml
from payload.training import gpu_use
from tests.support.clocks import replace_clock

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
INSUFFICIENT_SIZE = 7
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
REFRESHED_S = 0.1
TENSOR, DRAM, PCIE_TX = 5, 10, 20
"""NVML_GPM_METRIC_* for ``Gpu.levels``; 1 is the share of time in which the GPU was active."""


@dataclass
class Gpu:
    """A GPU. A figure that is None is NOT_SUPPORTED.

    util: percentages of time, of kernels and of memory traffic. levels: what it does from now on, by the
    number of the counter. watts: fill the counter of energy, if there is one. refusal: of samples of
    counters. mig: None: cards of this kind have no parts.
    """

    name: str = "NVIDIA H200"
    uuid: str = ""
    util: tuple[int, int] | None = (0, 0)
    watts: float = 0.0
    energy_mj: float | None = 0.0
    levels: dict[int, float] = field(default_factory=dict)
    has_counters: bool = True
    refusal: int = 0
    mig: bool | None = False
    pids: list[int] | None = field(default_factory=list)
    slowed_by: int | None = 0
    memory_mhz: int | None = 3201
    bus_bits: int | None = 6144
    is_lost: bool = False
    sums: dict[int, float] = field(default_factory=dict)


class Nvml:
    """The library, on a machine with these GPUs. ``now``: seconds by the machine's clock.

    lacks: functions that this driver does not have. fault: the code that the start fails with.
    """

    def __init__(self, *gpus: Gpu, lacks: Sequence[str] = (), fault: int = 0) -> None:
        self.gpus = gpus
        for index, gpu in enumerate(gpus):
            gpu.uuid = gpu.uuid or f"GPU-{index}"
        self.fault = fault
        self.now = 1000.0
        self._lacks = set(lacks)
        self._samples: dict[int, tuple[Gpu, float, dict[int, float]] | None] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self._lacks:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def put_into(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have pynvml and the payload's code on GPUs use this library and its clock."""
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        replace_clock(monkeypatch, nvml, gpu_use, monotonic=lambda: self.now)

    def work(self, seconds: float) -> None:
        """Let time pass, in which each GPU does what its ``levels`` and ``watts`` say."""
        self.now += seconds
        for gpu in self.gpus:
            for number, level in gpu.levels.items():
                gpu.sums[number] = gpu.sums.get(number, 0.0) + level * seconds
            if gpu.energy_mj is not None:
                gpu.energy_mj += 1000 * gpu.watts * seconds

    def nvmlInitWithFlags(self, _flags: int) -> int:
        return self.fault

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return _give(count, len(self.gpus))

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        if self.gpus[index.value].is_lost:
            return GPU_IS_LOST
        _point(device, 1 + index.value)
        return 0

    def nvmlDeviceGetUUID(self, device: Any, text: Any, _length: Any) -> int:
        text.value = self._gpu(device).uuid.encode()
        return 0

    def nvmlDeviceGetName(self, device: Any, text: Any, _length: Any) -> int:
        text.value = self._gpu(device).name.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, _device: Any, memory: Any) -> int:
        memory._obj.total = 80 << 30
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, current: Any, pending: Any) -> int:
        mig = self._gpu(device).mig
        return _give(current, mig) or _give(pending, mig)

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        util = self._gpu(device).util
        if util is None:
            return NOT_SUPPORTED
        rates._obj.gpu, rates._obj.memory = util
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, listed: Any) -> int:
        pids = self._gpu(device).pids
        if pids is None:
            return NOT_SUPPORTED
        room = count._obj.value
        count._obj.value = len(pids)
        if room < len(pids):
            return INSUFFICIENT_SIZE
        for at, pid in enumerate(pids):
            listed[at].pid = pid
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> int:
        return _give(milliwatts, round(1000 * self._gpu(device).watts))

    def nvmlDeviceGetMaxClockInfo(self, device: Any, kind: Any, mhz: Any) -> int:
        is_memory = kind.value == pynvml.NVML_CLOCK_MEM
        return _give(mhz, self._gpu(device).memory_mhz if is_memory else 1980)

    def nvmlDeviceGetMemoryBusWidth(self, device: Any, bits: Any) -> int:
        return _give(bits, self._gpu(device).bus_bits)

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, reasons: Any) -> int:
        return _give(reasons, self._gpu(device).slowed_by)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:
        energy = self._gpu(device).energy_mj
        return _give(millijoules, None if energy is None else round(energy))

    def nvmlGpmQueryDeviceSupport(self, device: Any, support: Any) -> int:
        if support._obj.version != 1:
            return ARGUMENT_VERSION_MISMATCH
        support._obj.isSupportedDevice = self._gpu(device).has_counters
        return 0

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        number = len(self._samples) + 1
        self._samples[number] = None
        _point(sample, number)
        return 0

    def nvmlGpmSampleGet(self, device: Any, sample: Any) -> int:
        gpu = self._gpu(device)
        if not gpu.has_counters or gpu.mig:
            return NOT_SUPPORTED
        if gpu.refusal:
            return gpu.refusal
        self._samples[_number(sample)] = gpu, self.now, dict(gpu.sums)
        return 0

    def nvmlGpmMetricsGet(self, query: Any) -> int:
        asked = query._obj
        if asked.version != 1:
            return ARGUMENT_VERSION_MISMATCH
        first, second = (
            self._samples.get(_number(sample)) for sample in (asked.sample1, asked.sample2)
        )
        if not first or not second or first[0] is not second[0] or not asked.numMetrics:
            return INVALID_ARGUMENT
        seconds = second[1] - first[1]
        for metric in asked.metrics[: asked.numMetrics]:
            number = metric.metricId
            metric.nvmlReturn = 0 if number in second[2] else NOT_SUPPORTED
            grown = second[2].get(number, 0.0) - first[2].get(number, 0.0)
            metric.value = grown / seconds if seconds >= REFRESHED_S else math.nan
        return 0

    def _gpu(self, device: Any) -> Gpu:
        return self.gpus[_number(device) - 1]


def _give(place: Any, value: Any) -> int:
    """Write a value to where a pointer of the caller leads."""
    if value is None:
        return NOT_SUPPORTED
    place._obj.value = value
    return 0


def _point(place: Any, number: int) -> None:
    """Write an opaque pointer, which is only a number here."""
    ctypes.c_void_p.from_buffer(place._obj).value = number


def _number(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0
