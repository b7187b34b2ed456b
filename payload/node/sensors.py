"""What the kernel, and NVIDIA's library, say about a node: one class a source."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

MIB = 1 << 20


class SensorError(Exception):
    """A source could not be read, or says what cannot be understood."""


class Sensor(Protocol):
    """A source of readings."""

    def read(self) -> dict[str, Any]:
        """Fields of one sample; the first reading of a rate gives none.

        Raises:
            SensorError: the source failed, and may be asked again.
        """


class Cpu:
    """Use of the node's cores since the last reading, in percent of all of them, and its load."""

    def __init__(self, cores: Collection[int], proc: Path = Path("/proc")) -> None:
        self._names = {f"cpu{core}" for core in cores}
        self._stat, self._loadavg = proc / "stat", proc / "loadavg"
        self._last: tuple[int, int] | None = None

    def read(self) -> dict[str, Any]:
        with _source(self._loadavg):
            fields = {"load1": float(self._loadavg.read_text().split()[0])}
        with _source(self._stat):
            before, self._last = self._last, self._ticks()
        if before:
            busy, elapsed = self._last[0] - before[0], self._last[1] - before[1]
            fields["cpu_percent"] = round(100 * max(0, busy) / max(1, elapsed), 1)
        return fields

    def _ticks(self) -> tuple[int, int]:
        """Clock ticks since boot, (busy, all), of the node's own cores."""
        busy = total = 0
        for line in self._stat.read_text().splitlines():
            name, *numbers = line.split()
            if name in self._names:
                user, nice, system, idle, iowait, irq, softirq, steal = map(int, numbers[:8])
                busy += user + nice + system + irq + softirq + steal
                total += user + nice + system + irq + softirq + steal + idle + iowait
        return busy, total


class Memory:
    """Memory in use, and what of it the job's control group holds where there is one."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._meminfo = proc / "meminfo"
        self._job = _job_memory(proc / "self/cgroup", cgroups)

    def read(self) -> dict[str, Any]:
        sizes = self._sizes()
        fields = {"memory_used_mib": (sizes["MemTotal"] - sizes["MemAvailable"]) // MIB}
        if self._job:
            with _source(self._job):
                fields["job_memory_mib"] = int(self._job.read_text()) // MIB
        return fields

    def total_mib(self) -> int:
        """All memory; a container sees its host's.

        Raises:
            SensorError: it is not to be read.
        """
        return self._sizes()["MemTotal"] // MIB

    def _sizes(self) -> dict[str, int]:
        """Bytes by name."""
        with _source(self._meminfo):
            lines = [line.replace(":", " ").split() for line in self._meminfo.read_text().splitlines()]
            sizes = {name: int(number) * 1024 for name, number, *_ in lines}
            return {name: sizes[name] for name in ("MemTotal", "MemAvailable")}


class Network:
    """Bytes per second through each interface but loopback, since the last reading."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._path = proc / "net/dev"
        self._last: tuple[float, dict[str, tuple[int, int]]] | None = None

    def read(self) -> dict[str, Any]:
        with _source(self._path):
            before, self._last = self._last, (time.monotonic(), self._counters())
        if before is None:
            return {}
        seconds = max(self._last[0] - before[0], 1e-3)
        received, sent = {}, {}
        for name, (rx, tx) in self._last[1].items():
            last_rx, last_tx = before[1].get(name, (rx, tx))
            received[name] = round(max(0, rx - last_rx) / seconds, 1)
            sent[name] = round(max(0, tx - last_tx) / seconds, 1)
        return {"net_rx_bytes_per_s": received, "net_tx_bytes_per_s": sent}

    def _counters(self) -> dict[str, tuple[int, int]]:
        """Bytes since boot, (received, sent), by interface."""
        counters = {}
        for line in self._path.read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            columns = numbers.split()
            counters[name.strip()] = int(columns[0]), int(columns[8])
        counters.pop("lo", None)
        return counters


class Gpus:
    """All GPUs of the node, if pynvml is installed. A figure that a GPU does not offer is None."""

    def __init__(self) -> None:
        self._nvml, self._handles = _open_nvml()

    def describe(self) -> list[dict[str, Any]]:
        """What each is."""
        return [
            {
                "index": index,
                "name": self._ask("nvmlDeviceGetName", handle),
                "uuid": self._ask("nvmlDeviceGetUUID", handle),
                "memory_total_mib": (memory := self._ask("nvmlDeviceGetMemoryInfo", handle))
                and memory.total // MIB,
            }
            for index, handle in self._handles
        ]

    def read(self) -> dict[str, Any]:
        """How each does."""
        return {"gpus": [self._state(index, handle) for index, handle in self._handles]}

    def energy_j(self, uuid: str | None) -> float | None:
        """What one of them has taken since the driver was loaded; None where it does not say."""
        for _, handle in self._handles:
            if self._ask("nvmlDeviceGetUUID", handle) == uuid:
                millijoules: int | None = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
                return None if millijoules is None else millijoules / 1000
        return None

    def _state(self, index: int, handle: Any) -> dict[str, Any]:
        use = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        return {
            "index": index,
            "util": use and use.gpu,  # percent of the time in which any kernel ran
            "mem_used_mib": memory and memory.used // MIB,
            "power_w": milliwatts and milliwatts / 1000,
            "temperature": self._ask("nvmlDeviceGetTemperature", handle, 0),  # of the chip, in °C
            # Since the driver was loaded.
            "energy_mj": self._ask("nvmlDeviceGetTotalEnergyConsumption", handle),
        }

    def _ask(self, function: str, *arguments: Any) -> Any:
        assert self._nvml  # noqa: S101 - there are no handles without it
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError:
            return None


def _open_nvml() -> tuple[ModuleType | None, list[tuple[int, Any]]]:
    """NVIDIA's management library, and the GPUs that answer with their numbers."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    handles = []
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # it fell off the bus, and the others go on
                handles.append((index, nvml.nvmlDeviceGetHandleByIndex(index)))
    return nvml, handles


def _job_memory(membership: Path, cgroups: Path) -> Path | None:
    """The file with the bytes that this Slurm job uses on this node, in control groups of version 2 or 1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (
            (cgroups / "memory", "memory.usage_in_bytes") if controllers else (cgroups, "memory.current")
        )
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            file = root / folder / name
            if folder.name.startswith("job_") and os.access(file, os.R_OK):
                return file
    return None


@contextmanager
def _source(path: Path) -> Iterator[None]:
    """Tell of any trouble with a source in one way."""
    try:
        yield
    except (OSError, ValueError, LookupError) as exc:
        raise SensorError(f"{path}: {exc}") from exc
