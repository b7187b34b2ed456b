"""What NVIDIA's management library says about a node's GPUs, where there are any and pynvml is installed."""

from __future__ import annotations

import importlib
from contextlib import suppress
from types import ModuleType
from typing import Any

from payload.node.sensors import MIB

Reading = dict[str, Any]


class Gpus:
    """All GPUs of the node. A figure that a GPU does not offer is None; without NVML there are no GPUs."""

    def __init__(self) -> None:
        self._nvml, self._handles = _open()

    def describe(self) -> list[Reading]:
        """What each is."""
        return [self._facts(index, handle) for index, handle in self._handles]

    def read(self) -> Reading:
        """How each does."""
        return {"gpus": [self._state(index, handle) for index, handle in self._handles]}

    def energy_j(self, uuid: str | None) -> float | None:
        """What one of them has taken since the driver was loaded; None where it does not say."""
        for _, handle in self._handles:
            if self._ask("nvmlDeviceGetUUID", handle) == uuid:
                millijoules: int | None = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
                return None if millijoules is None else millijoules / 1000
        return None

    def _facts(self, index: int, handle: Any) -> Reading:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return {
            "index": index,
            "name": self._ask("nvmlDeviceGetName", handle),
            "uuid": self._ask("nvmlDeviceGetUUID", handle),
            "memory_total_mib": memory and memory.total // MIB,
        }

    def _state(self, index: int, handle: Any) -> Reading:
        use = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        return {
            "index": index,
            "util": use and use.gpu,  # percent of the time in which any kernel ran
            "mem_used_mib": memory and memory.used // MIB,
            "power_w": milliwatts and milliwatts / 1000,
            "temperature": self._ask("nvmlDeviceGetTemperature", handle, 0),  # of the chip, in °C
            "energy_mj": self._ask(
                "nvmlDeviceGetTotalEnergyConsumption", handle
            ),  # since the driver was loaded
        }

    def _ask(self, function: str, *arguments: Any) -> Any:
        assert self._nvml  # noqa: S101 - there are no handles without it
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError:
            return None


def _open() -> tuple[ModuleType | None, list[tuple[int, Any]]]:
    """The library, and the GPUs that answer with their numbers."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return None, []
    handles = []
    for index in range(count):
        with suppress(nvml.NVMLError):  # it fell off the bus, and the others go on
            handles.append((index, nvml.nvmlDeviceGetHandleByIndex(index)))
    return nvml, handles
