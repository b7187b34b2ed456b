"""The GPUs of this node by NVML, NVIDIA's library: their state, and their use between two moments.

NVML's performance counters (GPM, of Hopper and newer) tell how much of the time the parts of a GPU
worked. NVIDIA documents them in nvml.h and, with the 0.1 s of ``REFRESHED_S``, in
https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import ModuleType
from typing import Any

from payload.node.sensors import MIB

# Variable with the number of GPUs that Slurm has given to the job on each node.
JOB_GPUS = "CLUSTERCTL_JOB_GPUS"
# nvml.h: NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_DEVICE_MIG_ENABLE, and nvmlClocksEventReason*.
SM_CLOCK = 1
MEMORY_CLOCK = 2
MIG_ENABLED = 1
SLOWED_BY = (
    (0x08, "a hardware protection"),
    (0x20, "its temperature"),
    (0x40, "its temperature (hardware)"),
    (0x80, "the power supply"),
)
ACTIVE = "active_percent"
BANDWIDTH = "bandwidth_percent"
# Our name of a counter, its number in nvml.h (NVML_GPM_METRIC_*), and the size of NVML's unit.
COUNTERS = (
    (ACTIVE, 1, 1),
    ("sm_percent", 2, 1),
    ("occupancy_percent", 3, 1),
    ("tensor_percent", 5, 1),
    (BANDWIDTH, 10, 1),
    ("pcie_tx_bytes_per_s", 20, MIB),
    ("pcie_rx_bytes_per_s", 21, MIB),
    ("nvlink_rx_bytes_per_s", 60, MIB),
    ("nvlink_tx_bytes_per_s", 61, MIB),
)
# The driver refreshes the counters at this interval. Two readings must be further apart.
REFRESHED_S = 0.1


class Counters:
    """A GPU's performance counters.

    missing: why this GPU has no counters, or why the driver refuses them. "": they can be read.
    """

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._began = time.monotonic()
        self.missing = ""
        # Older libraries lack the functions.
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self.missing = "the GPU has no performance counters"
                return
            self._last, self._next = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
            nvml.nvmlGpmSampleGet(handle, self._last)
        except (nvml.NVMLError, AttributeError) as exc:
            self.missing = str(exc)
            return
        self._query = nvml.c_nvmlGpmMetricsGet_t()
        self._query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._query.numMetrics = len(COUNTERS)
        for at, (_, number, _) in enumerate(COUNTERS):
            self._query.metrics[at].metricId = number

    def restart(self) -> None:
        """Begin an interval now. If the driver refuses that, the next reading is empty."""
        self._began = math.inf
        if not self.missing:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleGet(self._handle, self._last)
                self._began = time.monotonic()

    def read(self) -> dict[str, float]:
        """Return means over the time since the interval began, by name, and begin the next interval.

        A value that the driver does not give is left out. Empty, without a new interval: there are no
        counters, the driver refuses them now, or less than ``REFRESHED_S`` has passed.
        """
        now = time.monotonic()
        if self.missing or now - self._began < REFRESHED_S:
            return {}
        query = self._query
        try:
            self._nvml.nvmlGpmSampleGet(self._handle, self._next)
            query.sample1, query.sample2 = self._last, self._next
            self._nvml.nvmlGpmMetricsGet(query)
        except self._nvml.NVMLError:
            return {}
        self._began = now
        self._last, self._next = self._next, self._last
        values = zip(COUNTERS, query.metrics)
        return {
            name: round(value.value * unit, 3)
            for (name, _, unit), value in values
            # A value that can't be computed is NaN.
            if value.nvmlReturn == 0 and math.isfinite(value.value)
        }


class Card:
    """A GPU of this node. A value that the GPU does not report is None."""

    def __init__(self, nvml: ModuleType, index: int, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.index = index
        self.uuid: str | None = self._ask("nvmlDeviceGetUUID")
        # Several jobs may have parts of such a GPU, and its counters are those of all parts.
        self.is_in_parts = (self._ask("nvmlDeviceGetMigMode") or [0])[0] == MIG_ENABLED

    @cached_property
    def _counters(self) -> Counters | None:
        """None for a GPU in parts. The first use begins an interval, so that no counters run for
        programs that need none.
        """
        return None if self.is_in_parts else Counters(self._nvml, self._handle)

    def describe(self) -> dict[str, Any]:
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        missing = "the GPU is in MIG mode" if self._counters is None else self._counters.missing
        return {
            "index": self.index,
            "name": self._ask("nvmlDeviceGetName"),
            "uuid": self.uuid,
            "memory_total_mib": memory and memory.total // MIB,
            "peak_bytes_per_s": self.peak_bytes_per_s(),
            "counters_missing": missing or None,
        }

    def state(self, processes: Sequence[int] | None) -> dict[str, Any]:
        """Return the GPU's readings, with those of its counters since the last call.

        processes: as ``processes`` returned them.
        """
        use = self.utilization()
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return {
            "index": self.index,
            "util": use and use.gpu,  # percent of time
            "mem_util": use and use.memory,  # percent of time
            "mem_used_mib": memory and memory.used // MIB,
            "mem_total_mib": memory and memory.total // MIB,
            "processes": None if processes is None else len(processes),
            "clock_mhz": self._ask("nvmlDeviceGetClockInfo", SM_CLOCK),
            "max_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
            "slowed_by": self._slowed_by(),
            "power_w": milliwatts and milliwatts / 1000,
            "temperature": self._ask("nvmlDeviceGetTemperature", 0),  # °C
            "energy_mj": self._energy_mj(),
            **self.activity(),
        }

    def activity(self) -> dict[str, float]:
        """Return the values of the counters since the last call, as ``Counters.read``; also
        ``bandwidth_bytes_per_s`` if the peak of the GPU's memory is known.
        """
        values = {} if self._counters is None else self._counters.read()
        peak = self.peak_bytes_per_s() if BANDWIDTH in values else None
        return (
            values
            if peak is None
            else {**values, "bandwidth_bytes_per_s": values[BANDWIDTH] / 100 * peak}
        )

    def restart(self) -> None:
        """Let ``activity`` tell of the time from now on."""
        if self._counters is not None:
            self._counters.restart()

    def energy_j(self) -> float | None:
        """Return the joules that the GPU has used since its driver was loaded."""
        millijoules = self._energy_mj()
        return None if millijoules is None else millijoules / 1000

    def peak_bytes_per_s(self) -> float | None:
        """Return the theoretical peak of the GPU's memory: two transfers in each cycle of its highest
        clock, over the whole bus, as in CUDA's sample deviceQuery.
        """
        mhz = self._ask("nvmlDeviceGetMaxClockInfo", MEMORY_CLOCK)
        bits = self._ask("nvmlDeviceGetMemoryBusWidth")
        return 2 * mhz * 1e6 * bits / 8 if mhz and bits else None

    def processes(self) -> list[int] | None:
        """Return the ids of the processes that compute on the GPU. A container may not see them."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else [process.pid for process in processes]

    def utilization(self) -> Any:
        """Return NVML's rates ``gpu`` and ``memory``: the percentages of the last 1/6 to 1 s in which
        any kernel ran, and in which the memory was read or written.
        """
        return self._ask("nvmlDeviceGetUtilizationRates")

    def _energy_mj(self) -> int | None:
        """Return the counter in millijoules; None for a GPU in parts, whose jobs share it."""
        if self.is_in_parts:
            return None
        millijoules: int | None = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return millijoules

    def _slowed_by(self) -> list[str] | None:
        """Return why the driver slows the GPU down. None: unknown.

        Its power limit is no reason: busy GPUs are usually at it.
        """
        bits: int | None = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            return None
        return [reason for bit, reason in SLOWED_BY if bits & bit]

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        # Older libraries lack some functions.
        except (self._nvml.NVMLError, AttributeError):
            return None


def open_cards() -> list[Card]:
    """Return each GPU that answers, if NVIDIA's library pynvml is installed."""
    try:
        import pynvml as nvml
    except ImportError:
        return []
    cards = []
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            # A GPU that fell off the bus does not answer.
            with suppress(nvml.NVMLError):
                cards.append(Card(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
    return cards


def open_card(uuid: object) -> Card | None:
    """Return the GPU with this id. None: NVML does not know it, as it is for parts of a GPU."""
    return next((card for card in open_cards() if uuid is not None and card.uuid == uuid), None)


class GpuSensor:
    """All GPUs of the node, as a source of telemetry.

    users: process id -> indices of the GPUs on which the process computes, at the last reading, as far
        as GPUs report it. A container may not see the ids of its processes.
    """

    def __init__(self) -> None:
        self._cards = open_cards()
        self.users: Mapping[int, Sequence[int]] = {}

    def describe(self) -> list[dict[str, Any]]:
        return [card.describe() for card in self._cards]

    def read(self) -> dict[str, Any]:
        users: dict[int, list[int]] = defaultdict(list)
        states = []
        for card in self._cards:
            processes = card.processes()
            for pid in processes or ():
                users[pid].append(card.index)
            states.append(card.state(processes))
        self.users = users
        fields: dict[str, Any] = {"gpus": states}
        # The number of GPUs that Slurm has given to the job here.
        if (given := os.environ.get(JOB_GPUS, "")).isdecimal():
            fields["job_gpus"] = int(given)
        return fields
