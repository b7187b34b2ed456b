"""The share of this machine that each node gets, and what becomes of nodes that have another one."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.providers.base import HostChange, Size, Sizes
from clusterctl.providers.local import layout
from clusterctl.spec.common import LEAST_MEMORY_MIB, User
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import shown_memory
from clusterctl.state.inventory import Host


def compare(
    spec: ClusterSpec,
    nodes: Sequence[Share],
    found: layout.Existing,
    hosts: Mapping[str, Host],
    recreated: Collection[str] = (),
) -> Iterator[HostChange]:
    """Yield what becomes of each machine. ``hosts``: as `up` left them."""
    prices: dict[str | None, float | None] = {one.name: one.price_per_hour for one in spec.partitions}
    yield _change(spec.controller_host, "the controller", found)
    for share in nodes:
        was, price = Size.of(hosts.get(share.host)), prices[share.partition]
        before = str(was) if was and was != share.size else ""
        is_replaced = share.host in recreated or found.nodes.get(share.host) != share.size.disk_mib
        yield _change(share.host, str(share.size), found, price, before=before, is_replaced=is_replaced)
    for name in sorted(found.nodes.keys() - {spec.controller_host, *(share.host for share in nodes)}):
        host = hosts.get(name)
        price = prices.get(host.partition) if host else None
        yield HostChange(
            name, "remove", str(Size.of(host) or "a node"), "the spec has no place for it", price
        )


def _change(
    name: str,
    what: str,
    found: layout.Existing,
    price: float | None = None,
    *,
    before: str = "",
    is_replaced: bool = False,
) -> HostChange:
    if name not in found.nodes:
        return HostChange(name, "make", what, usd_per_hour=price)
    off = name not in found.running
    why = "; ".join(["it is off"] * off + [f"{before} until now"] * bool(before))
    if is_replaced:
        return HostChange(name, "replace", what, why, price)
    return HostChange(name, "change" if why else "keep", what, why, price, off=off)


_RESERVE_MIB = 1024  # for this machine itself and the controller's daemons


@dataclass(frozen=True, slots=True)
class Share:
    host: str
    partition: str
    cores: tuple[int, ...]
    size: Size


@dataclass(frozen=True, slots=True)
class Hardware:
    """This machine's usable cores and memory."""

    cores: tuple[int, ...]
    memory_mib: int

    @classmethod
    def here(cls) -> Hardware:
        """Read from the kernel: the cores we may run on, and the memory in all."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
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
    nodes = []
    cursor = 0
    for partition in spec.partitions:
        for host in spec.node_names(partition):
            kept = (keep or {}).get(host)
            cpus = kept.cpus if kept else partition.cpus or cpus_each
            cores = {hardware.cores[(cursor + i) % len(hardware.cores)] for i in range(cpus)}
            cursor += cpus
            memory = kept.memory_mib if kept else partition.memory or memory_each
            size = Size(cpus, memory, partition.disk)
            nodes.append(Share(host, partition.name, tuple(sorted(cores)), size))
    return tuple(nodes), _notes(tuple(nodes), hardware)


def shares_here(spec: ClusterSpec, keep: Sizes) -> tuple[tuple[Share, ...], tuple[str, ...]]:
    """The shares of this very machine, and all that is to be said of them."""
    shares, notes = divide(spec, Hardware.here(), keep)
    return shares, notes + tuple(same_uids(spec.users))


def is_oversubscribed(nodes: Sequence[Share]) -> bool:
    """Whether some core is in the share of more than one node."""
    return sum(share.size.cpus for share in nodes) > len({core for share in nodes for core in share.cores})


def _notes(nodes: tuple[Share, ...], hardware: Hardware) -> tuple[str, ...]:
    notes = []
    cpus = sum(share.size.cpus for share in nodes)
    if cpus > len(hardware.cores):
        notes.append(
            f"oversubscribed: the nodes have {cpus} cores together, this machine has {len(hardware.cores)}; "
            "they share them, so timings mean little"
        )
    memory = sum(share.size.memory_mib for share in nodes)
    if memory > hardware.memory_mib:
        notes.append(
            f"oversubscribed: the nodes have {shown_memory(memory)} of memory together, "
            f"this machine has {shown_memory(hardware.memory_mib)}"
        )
    return tuple(notes)


def same_uids(users: Iterable[User]) -> Iterator[str]:
    """Notes on the accounts of this machine that have the uid of another account on the nodes.

    Processes of nodes are this machine's: its kernel knows them by their uid.
    """
    for user in users:
        with suppress(KeyError):
            if (name := pwd.getpwuid(user.uid).pw_name) != user.name:
                yield (
                    f"uid {user.uid} is {name}'s on this machine: {name} can read and end what runs as "
                    f"{user.name} on the nodes; `users` of the spec gives {user.name} another `uid`"
                )
