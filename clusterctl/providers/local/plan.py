"""The division of this machine among the nodes, and the changes `up` would make to them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from clusterctl.providers.base import HostChange, Size
from clusterctl.providers.local.layout import Existing
from clusterctl.spec.models import LEAST_MEMORY_MIB, ClusterSpec
from clusterctl.spec.units import format_size
from clusterctl.state.inventory import Host

_CONTROLLER = "the controller"
_OFF = "it is off"


def compare(
    spec: ClusterSpec, shares: Sequence[Share], found: Existing, hosts: Mapping[str, Host]
) -> tuple[HostChange, ...]:
    """What becomes of each machine. ``hosts``: as `up` left them."""
    off = found.nodes.keys() - found.running
    wanted = {share.host: share for share in shares}
    prices = {partition.name: partition.price_per_hour for partition in spec.partitions}
    changes = [_controller(spec.controller_host, found, off)]
    changes += [_node(share, prices[share.partition], found, off, hosts.get(share.host)) for share in shares]
    gone = (name for name in found.nodes if name != spec.controller_host and name not in wanted)
    return (*changes, *(_gone(name, prices, hosts.get(name)) for name in gone))


def _controller(name: str, found: Existing, off: AbstractSet[str]) -> HostChange:
    if name not in found.nodes:
        return HostChange(name, "make", _CONTROLLER)
    if name in off:
        return HostChange(name, "change", _CONTROLLER, _OFF, off=True)
    return HostChange(name, "keep", _CONTROLLER)


def _node(
    share: Share, price: float | None, found: Existing, off: AbstractSet[str], host: Host | None
) -> HostChange:
    name, size = share.host, Size(share.cpus, share.memory_mib, share.disk_mib)
    what = _words(size)
    if name not in found.nodes:
        return HostChange(name, "make", what, usd_per_hour=price)
    if found.nodes[name] != size.disk_mib:
        return HostChange(name, "replace", what, _disks(found.nodes[name], size.disk_mib), price)
    why = [*([_OFF] if name in off else []), *_differences(host, size)]
    return HostChange(name, "change" if why else "keep", what, "; ".join(why), price, off=name in off)


def _gone(name: str, prices: Mapping[str, float | None], host: Host | None) -> HostChange:
    what, why = "a node", "the spec has no place for it"
    if host is None or host.cpus is None or host.memory_mib is None:
        return HostChange(name, "remove", what, why)
    what = _words(Size(host.cpus, host.memory_mib, host.disk_mib))
    return HostChange(name, "remove", what, why, prices.get(host.partition or ""))


def _differences(host: Host | None, size: Size) -> Iterator[str]:
    if host is None or host.cpus is None or host.memory_mib is None:
        return
    if host.cpus != size.cpus:
        yield f"{_cpus(host.cpus)} until now"
    if host.memory_mib != size.memory_mib:
        yield f"{format_size(host.memory_mib)} of memory until now"


def _disks(now: int | None, then: int | None) -> str:
    if now is None:
        return "it has no disk of its own until now"
    return f"{format_size(now)} of disk until now" if then else "it has a disk of its own until now"


def _cpus(count: int) -> str:
    return f"{count} CPU{'s' if count > 1 else ''}"


def _words(size: Size) -> str:
    """``2 CPUs, 4GiB of memory``."""
    parts = [_cpus(size.cpus), f"{format_size(size.memory_mib)} of memory"]
    if size.disk_mib is not None:
        parts.append(f"{format_size(size.disk_mib)} of disk")
    return ", ".join(parts)


_RESERVE_MIB = 1024  # for this machine itself and the controller's daemons


@dataclass(frozen=True, slots=True)
class Share:
    """What one compute node gets."""

    host: str
    partition: str
    cores: tuple[int, ...]
    cpus: int
    memory_mib: int
    disk_mib: int | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """This machine's usable cores and memory."""

    cores: tuple[int, ...]
    memory_mib: int

    @classmethod
    def here(cls) -> Hardware:
        """Read from the kernel: the cores we may run on, and the memory in all."""
        total_kib = next(
            int(line.split()[1])
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemTotal:")
        )
        return cls(tuple(sorted(os.sched_getaffinity(0))), total_kib // 1024)


def divide(
    spec: ClusterSpec, hardware: Hardware, keep: Mapping[str, Size] | None = None
) -> tuple[tuple[Share, ...], tuple[str, ...]]:
    """The share of each compute node, and what the user should be told about it.

    Nodes in ``keep`` have the cpus and the memory that are said there.
    """
    count = sum(p.nodes for p in spec.partitions)
    cpus_each = max(1, len(hardware.cores) // count)
    memory_each = max(LEAST_MEMORY_MIB, (hardware.memory_mib - _RESERVE_MIB) // count)
    shares = []
    cursor = 0
    for partition in spec.partitions:
        for host in spec.node_names(partition):
            kept = (keep or {}).get(host)
            cpus = kept.cpus if kept else partition.cpus or cpus_each
            cores = {hardware.cores[(cursor + i) % len(hardware.cores)] for i in range(cpus)}
            cursor += cpus
            memory = kept.memory_mib if kept else partition.memory or memory_each
            shares.append(Share(host, partition.name, tuple(sorted(cores)), cpus, memory, partition.disk))
    return tuple(shares), _notes(tuple(shares), hardware)


def is_oversubscribed(shares: Sequence[Share]) -> bool:
    """Whether some core is in the share of more than one node."""
    return sum(share.cpus for share in shares) > len({core for share in shares for core in share.cores})


def _notes(shares: tuple[Share, ...], hardware: Hardware) -> tuple[str, ...]:
    notes = []
    cpus = sum(share.cpus for share in shares)
    if cpus > len(hardware.cores):
        notes.append(
            f"oversubscribed: the nodes have {cpus} cores together, this machine has {len(hardware.cores)}; "
            "they share them, so timings mean little"
        )
    memory = sum(share.memory_mib for share in shares)
    if memory > hardware.memory_mib:
        notes.append(
            f"oversubscribed: the nodes have {format_size(memory)} of memory together, "
            f"this machine has {format_size(hardware.memory_mib)}"
        )
    return tuple(notes)
