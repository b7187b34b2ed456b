"""How the nodes share this machine honestly: disjoint cores while there are enough, memory divided."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.providers.base import Size
from clusterctl.spec.models import LEAST_MEMORY_MIB, ClusterSpec
from clusterctl.spec.units import format_size

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
