"""Readings of a node from the kernel, with a class per source. Those of GPUs are in nvml.py."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

MIB = 1 << 20
# Version 1 of control groups has a number like this if there is no limit.
NO_LIMIT = 1 << 60
TMP = "/tmp"  # noqa: S108


class SensorError(Exception):
    """A source could not be read, or its content could not be parsed."""


class Sensor(Protocol):
    """A source of readings, such as a file in /proc."""

    def read(self) -> dict[str, Any]:
        """Return readings by name. The first call returns no rates, because a rate needs two
        readings.

        Raises SensorError if the source fails. A later call may succeed.
        """


def own_group(cgroups: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the control group (version 2) of this node if the node is a container, such as a local
    node.

    Nodes that share a machine must not each report the load of the machine. Return None on a
    machine: it is the root group, which has no cgroup.events.
    """
    for group in (cgroups, cgroups / "unified"):
        if os.access(group / "cgroup.events", os.R_OK) and os.access(group / "cpu.stat", os.R_OK):
            return group
    return None


class CpuSensor:
    """Usage of the node's cores since the last reading, in percent of all cores, and a machine's
    load.

    group: the node's control group if the node is a container (see ``own_group``).
    """

    def __init__(
        self, cores: Collection[int], proc: Path = Path("/proc"), group: Path | None = None
    ) -> None:
        self._names = {f"cpu{core}" for core in cores}
        self._is_group = group is not None
        self._loadavg = proc / "loadavg"
        self._stat = group / "cpu.stat" if group else proc / "stat"
        self._last: tuple[int, int] | None = None

    def read(self) -> dict[str, Any]:
        fields = {}
        if not self._is_group:
            with _source(self._loadavg):
                fields["load1"] = float(self._loadavg.read_text().split()[0])
        with _source(self._stat):
            previous = self._last
            self._last = self._times() if self._is_group else self._ticks()
        if previous:
            busy = self._last[0] - previous[0]
            elapsed = self._last[1] - previous[1]
            fields["cpu_percent"] = round(min(100.0, 100 * max(0, busy) / max(1, elapsed)), 1)
        return fields

    def _times(self) -> tuple[int, int]:
        """Return the microseconds of the node's processes, and of all its cores: (busy, total)."""
        busy = dict(line.split() for line in self._stat.read_text().splitlines())["usage_usec"]
        return int(busy), time.monotonic_ns() // 1000 * len(self._names)

    def _ticks(self) -> tuple[int, int]:
        """Return the clock ticks of the node's cores since boot, (busy, total)."""
        busy = total = 0
        for line in self._stat.read_text().splitlines():
            name, *numbers = line.split()
            if name in self._names:
                user, nice, system, idle, iowait, irq, softirq, steal = map(int, numbers[:8])
                busy += user + nice + system + irq + softirq + steal
                total += user + nice + system + irq + softirq + steal + idle + iowait
        return busy, total


class MemorySensor:
    """Memory in use on the whole node, and memory in use by this Slurm job (its control group).

    group: the node's control group if the node is a container (see ``own_group``).
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        group: Path | None = None,
    ) -> None:
        self._proc = proc
        self._meminfo = proc / "meminfo"
        self._group = group
        self._job = _job_memory(proc / "self/cgroup", cgroups)

    def read(self) -> dict[str, Any]:
        fields = {"memory_used_mib": self._used() // MIB}
        if self._job:
            with _source(self._job):
                fields["job_memory_mib"] = int(self._job.read_text()) // MIB
                fields |= _job_use(self._job.parent)
        return fields

    @property
    def is_of_job(self) -> bool:
        """Whether the kernel counts the memory of this Slurm job."""
        return self._job is not None

    def total_mib(self) -> int:
        """Return the machine's total memory in MiB, even in a container. Raises SensorError if that
        fails.
        """
        return self._sizes()["MemTotal"] // MIB

    def _used(self) -> int:
        """Return the bytes in use, without files that the kernel can drop from memory."""
        if not self._group:
            sizes = self._sizes()
            return sizes["MemTotal"] - sizes["MemAvailable"]
        current = self._group / "memory.current"
        if not os.access(current, os.R_OK):
            return sum(map(own_memory, self._proc.glob("[0-9]*")))
        with _source(current):
            lines = (self._group / "memory.stat").read_text().splitlines()
            return int(current.read_text()) - int(
                dict(line.split() for line in lines)["inactive_file"]
            )

    def _sizes(self) -> dict[str, int]:
        with _source(self._meminfo):
            lines = [
                line.replace(":", " ").split() for line in self._meminfo.read_text().splitlines()
            ]
            sizes = {name: int(number) * 1024 for name, number, *_ in lines}
            return {name: sizes[name] for name in ("MemTotal", "MemAvailable")}


class NetworkSensor:
    """Bytes per second through each interface except loopback, since the last reading."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._path = proc / "net/dev"
        self._last: tuple[float, dict[str, tuple[int, int]]] | None = None

    def read(self) -> dict[str, Any]:
        with _source(self._path):
            previous = self._last
            self._last = (time.monotonic(), self._counters())
        if previous is None:
            return {}
        seconds = max(self._last[0] - previous[0], 1e-3)
        received = {}
        sent = {}
        for name, (rx, tx) in self._last[1].items():
            last_rx, last_tx = previous[1].get(name, (rx, tx))
            received[name] = round(max(0, rx - last_rx) / seconds, 1)
            sent[name] = round(max(0, tx - last_tx) / seconds, 1)
        return {"net_rx_bytes_per_s": received, "net_tx_bytes_per_s": sent}

    def _counters(self) -> dict[str, tuple[int, int]]:
        """Return, by interface, the bytes (received, sent) since boot."""
        counters = {}
        for line in self._path.read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            columns = numbers.split()
            counters[name.strip()] = int(columns[0]), int(columns[8])
        counters.pop("lo", None)
        return counters


class DiskSensor:
    """The free room of the node's own folder for temporary files."""

    def __init__(self, folder: str = TMP) -> None:
        self._folder = folder

    def read(self) -> dict[str, Any]:
        with _source(Path(self._folder)):
            return {"tmp": room(self._folder)}


def room(folder: str) -> dict[str, int]:
    """Return the bytes and the inodes that a user may still use on the file system of a folder, and
    all of them. inodes: 0: it has no fixed number. Raises OSError.
    """
    status = os.statvfs(folder)
    return {
        "free": status.f_bavail * status.f_frsize,
        "total": (status.f_blocks - status.f_bfree + status.f_bavail) * status.f_frsize,
        "free_inodes": status.f_favail,
        "inodes": status.f_files,
    }


def _job_use(group: Path) -> dict[str, int]:
    """Return the memory of a job's control group without files that the kernel can drop, and its
    limit, both in MiB. Empty if the group is not limited.
    """
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Only version 1 has it: its limit is there, and the sums of the group with its children.
        limit = stat.get("hierarchical_memory_limit") or (group / "memory.max").read_text().strip()
    except OSError:
        return {}
    if not limit.isdecimal() or int(limit) >= NO_LIMIT:
        return {}
    names = ("total_rss", "total_shmem") if "total_rss" in stat else ("anon", "shmem")
    used = sum(int(stat[name]) for name in names if name in stat)
    return {"job_used_mib": used // MIB, "job_limit_mib": int(limit) // MIB}


def own_memory(process: Path) -> int:
    """Return the bytes of a process that are not in files: its own, and its share of the memory that
    it shares with other processes. 0 for a thread of the kernel. process: its folder in /proc.

    The memory controller may be missing in a container. The share in a process of another user can
    only be read by root, and does not count.
    """
    own = _sizes_in(process / "status", "RssAnon:", "RssShmem:")
    shared = own.get("RssShmem:", 0)
    if shared:
        # Reading this is slow, and few processes share memory.
        shared = _sizes_in(process / "smaps_rollup", "Pss_Shmem:").get("Pss_Shmem:", 0)
    return own.get("RssAnon:", 0) + shared


def _sizes_in(path: Path, *names: str) -> dict[str, int]:
    """Return the bytes in the lines of a file of /proc with these names."""
    # The process may have ended.
    with suppress(OSError):
        words = [line.split() for line in path.read_text(errors="replace").splitlines()]
        return {line[0]: int(line[1]) * 1024 for line in words if line and line[0] in names}
    return {}


def _job_memory(membership: Path, cgroups: Path) -> Path | None:
    """Return the file with this Slurm job's memory use, if any. membership: the file
    /proc/self/cgroup.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (
            (cgroups / "memory", "memory.usage_in_bytes")
            if controllers
            else (cgroups, "memory.current")
        )
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            file = root / folder / name
            if folder.name.startswith("job_") and os.access(file, os.R_OK):
                return file
    return None


@contextmanager
def _source(path: Path) -> Iterator[None]:
    """Convert errors in a ``with`` block that reads ``path`` to SensorError."""
    try:
        yield
    except (OSError, ValueError, LookupError) as exc:
        raise SensorError(f"{path}: {exc}") from exc
