# ruff: noqa: N802 - the names are those of pynvml
"""Telemetry of GPUs, where NVML answers as it does on nodes whose driver or cards are not well."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from payload.node.sensors import Gpus

# nvmlReturn_t
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18


class Nvml(ModuleType):
    """pynvml on a node with three cards, of which one may have fallen off the bus."""

    class NVMLError(Exception):
        """What pynvml raises."""

    def __init__(self, *, fault: int = 0, lost: int | None = None) -> None:
        super().__init__("pynvml")
        self.fault = fault
        self.lost = lost

    def nvmlInit(self) -> None:
        if self.fault:
            raise self.NVMLError(self.fault)

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index == self.lost:
            raise self.NVMLError(GPU_IS_LOST)
        return f"GPU-{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, _: str) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30, used=0)


def gpus(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> list[tuple[object, object]]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return [(one["index"], one["uuid"]) for one in Gpus().describe()]


def test_gpu_off_the_bus_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus(monkeypatch, Nvml(lost=1)) == [(0, "GPU-0"), (2, "GPU-2")]
    assert gpus(monkeypatch, Nvml()) == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2")]


def test_nvml_of_another_version_than_the_driver_has_no_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpus(monkeypatch, Nvml(fault=LIB_RM_VERSION_MISMATCH)) == []


@pytest.mark.parametrize(("rates", "use"), [((0, 7, 3), 7), ((0, 0, 0), 0), ((0, None, 3), None)])
def test_memory_use_of_a_gpu_in_parts_is_the_highest(
    monkeypatch: pytest.MonkeyPatch, rates: tuple[int | None, ...], use: int | None
) -> None:
    nvml = Nvml()

    def rates_of(handle: str) -> SimpleNamespace:
        rate = rates[int(handle[-1])]
        if rate is None:
            raise nvml.NVMLError(GPU_IS_LOST)
        return SimpleNamespace(gpu=100, memory=rate)

    nvml.nvmlDeviceGetUtilizationRates = rates_of
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Gpus().memory_use() == use


def test_reasons_of_slow_clocks_are_named_but_not_the_power_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are those of nvml.h: 0x04 the power limit, 0x40 heat, 0x80 the power brake."""
    nvml = Nvml()
    bits = {"GPU-0": 0x04, "GPU-1": 0xC4}

    def reasons_of(handle: str) -> int:
        if handle not in bits:
            raise nvml.NVMLError(GPU_IS_LOST)
        return bits[handle]

    nvml.nvmlDeviceGetCurrentClocksEventReasons = reasons_of
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: (
        [SimpleNamespace(pid=7)] if handle == "GPU-2" else []
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CLUSTERCTL_JOB_GPUS", "3")
    gpus = Gpus()
    found = gpus.read()
    assert found["job_gpus"] == 3
    slowed_by = [gpu["slowed_by"] for gpu in found["gpus"]]
    assert slowed_by == [[], ["its temperature (hardware)", "the power supply"], None]
    assert [gpu["processes"] for gpu in found["gpus"]] == [0, 0, 1]
    assert gpus.users == {7: [2]}
