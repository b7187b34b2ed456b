"""Divide this machine's cores and memory among local nodes, and compare the result with existing
nodes.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.providers.base import Action, HostChange, HostSize
from clusterctl.providers.local import layout
from clusterctl.spec.common import LEAST_MEMORY_MIB, User
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Host
from clusterctl.util import formatting


def compare(
    spec: ClusterSpec,
    nodes: Sequence[NodeShare],
    existing: layout.ExistingMachines,
    hosts: Mapping[str, Host],
    recreated: Collection[str] = (),
) -> Iterator[HostChange]:
    """Yield the planned change of each node.

    nodes: the nodes in the spec, with their shares of this machine. existing: the nodes on this
        machine now.
    hosts: the inventory of the last `up`, by name, which has the previous sizes.
    """
    prices: dict[str | None, float | None] = {p.name: p.price_per_hour for p in spec.partitions}
    yield _change(spec.controller_host, "the controller", existing)
    for share in nodes:
        previous_size = HostSize.of(hosts.get(share.host))
        price = prices[share.partition]
        previous = str(previous_size) if previous_size and previous_size != share.size else ""
        yield _change(
            share.host,
            str(share.size),
            existing,
            price,
            previous=previous,
            is_replaced=share.host in recreated,
        )
    for name in sorted(existing.nodes - {spec.controller_host, *(share.host for share in nodes)}):
        host = hosts.get(name)
        price = prices.get(host.partition) if host else None
        yield HostChange(
            name, "remove", str(HostSize.of(host) or "a node"), "no longer in the spec", price
        )


def _change(
    name: str,
    title: str,
    existing: layout.ExistingMachines,
    price: float | None = None,
    *,
    previous: str = "",
    is_replaced: bool = False,
) -> HostChange:
    if name not in existing.nodes:
        return HostChange(name, "make", title, usd_per_hour=price)
    is_off = name not in existing.running
    reasons = []
    if is_off:
        reasons.append("it is off")
    if previous:
        reasons.append(f"was {previous}")
    reason = "; ".join(reasons)
    if is_replaced:
        return HostChange(name, "replace", title, reason, price)
    action: Action = "change" if reason else "keep"
    ends_jobs = bool(previous) and not is_off
    return HostChange(name, action, title, reason, price, ends_jobs=ends_jobs, off=is_off)


# Left for this machine itself and the controller's daemons.
_RESERVE_MIB = 1024


@dataclass(frozen=True, slots=True)
class NodeShare:
    host: str
    partition: str
    cores: tuple[int, ...]
    size: HostSize


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """The usable cores and the memory of this machine."""

    cores: tuple[int, ...]
    memory_mib: int

    @classmethod
    def here(cls) -> MachineCapacity:
        """Return the cores that this process may use, and the total memory of this machine."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
        return cls(tuple(sorted(os.sched_getaffinity(0))), total_kib // 1024)


def divide(
    spec: ClusterSpec, hardware: MachineCapacity
) -> tuple[tuple[NodeShare, ...], tuple[str, ...]]:
    """Return (each node's share of the hardware, notes)."""
    count = sum(p.nodes for p in spec.partitions)
    cpus_each = max(1, len(hardware.cores) // count)
    memory_each = max(LEAST_MEMORY_MIB, (hardware.memory_mib - _RESERVE_MIB) // count)
    nodes = []
    cursor = 0
    for partition in spec.partitions:
        for host in spec.node_names(partition):
            cpus = partition.cpus or cpus_each
            cores = {hardware.cores[(cursor + i) % len(hardware.cores)] for i in range(cpus)}
            cursor += cpus
            memory = partition.memory or memory_each
            size = HostSize(cpus, memory)
            nodes.append(NodeShare(host, partition.name, tuple(sorted(cores)), size))
    return tuple(nodes), _notes(tuple(nodes), hardware)


def shares_here(spec: ClusterSpec) -> tuple[tuple[NodeShare, ...], tuple[str, ...]]:
    """Return (shares, notes) as ``divide`` does, for this machine. Add the notes of
    ``same_uids``.
    """
    shares, notes = divide(spec, MachineCapacity.here())
    return shares, notes + tuple(same_uids(spec.users))


def is_oversubscribed(nodes: Sequence[NodeShare]) -> bool:
    return sum(share.size.cpus for share in nodes) > len(
        {core for share in nodes for core in share.cores}
    )


def _notes(nodes: tuple[NodeShare, ...], hardware: MachineCapacity) -> tuple[str, ...]:
    notes = []
    cpus = sum(share.size.cpus for share in nodes)
    if cpus > len(hardware.cores):
        notes.append(
            f"oversubscribed: the nodes have {cpus} cores together, this machine has "
            f"{len(hardware.cores)}; nodes share cores, so timings mean little"
        )
    memory = sum(share.size.memory_mib for share in nodes)
    if memory > hardware.memory_mib:
        notes.append(
            f"oversubscribed: the nodes have {formatting.size(memory << 20)} of memory together, "
            f"this machine has {formatting.size(hardware.memory_mib << 20)}"
        )
    return tuple(notes)


def same_uids(users: Iterable[User]) -> Iterator[str]:
    """Yield a note for each user if this machine has an account with the same uid and another
    name.
    """
    for user in users:
        with suppress(KeyError):
            if (name := pwd.getpwuid(user.uid).pw_name) != user.name:
                yield (
                    f"uid {user.uid} belongs to {name} on this machine: {name} can read and kill "
                    f"the processes of {user.name} on the nodes; to avoid this, set another "
                    "`uid` under `users`"
                )
