"""What `up` would do to the machines of a cluster: those that are there, compared with the shares of a spec.

All of it is read from what lies here for all to read: it takes neither root nor a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from clusterctl.inventory import Host, Inventory
from clusterctl.providers.base import HostChange, Size
from clusterctl.providers.local import machine
from clusterctl.providers.local.layout import ClusterState, cluster_dir, machine_name, state_file
from clusterctl.providers.local.mounts import disk_mib
from clusterctl.providers.local.shares import Share
from clusterctl.spec import ClusterSpec
from clusterctl.spec.units import format_size
from clusterctl.workspace import Workspace

_CONTROLLER = "the controller"
_OFF = "it is off"


@dataclass(frozen=True, slots=True)
class Existing:
    """The machines that a cluster has: name -> the size of its disk; ``hosts`` as `up` left them."""

    state: ClusterState | None = None
    nodes: Mapping[str, int | None] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)

    def running(self) -> frozenset[str] | None:
        """The nodes that run; None where the processes of others are hidden from us."""
        if self.state is None:
            return frozenset()
        try:
            Path("/proc/1/cmdline").read_bytes()
        except OSError:
            return None
        numbers, alive = self.state.numbers.items(), machine.alive()
        return frozenset(name for name, number in numbers if machine_name(self.state.id, number) in alive)


def existing(workspace: Workspace) -> Existing:
    """What there is of the cluster of a workspace."""
    cluster_id = workspace.cluster_id()
    try:
        state = ClusterState.model_validate_json(state_file(cluster_id).read_bytes())
    except FileNotFoundError:
        return Existing()
    folder = cluster_dir(cluster_id) / "nodes"
    nodes = {path.name: disk_mib(path) for path in sorted(folder.glob("[!.]*"))}  # hidden: being removed
    try:
        inventory = Inventory.model_validate_json(workspace.hosts.read_bytes())
    except (FileNotFoundError, ValidationError):
        return Existing(state, nodes)
    return Existing(state, nodes, {host.name: host for host in inventory.hosts})


def compare(
    spec: ClusterSpec, shares: Sequence[Share], found: Existing, running: Collection[str] | None
) -> tuple[HostChange, ...]:
    """What becomes of each machine. ``running``: those that do, or None where that is not known."""
    off = frozenset() if running is None else found.nodes.keys() - running
    wanted = {share.host: share for share in shares}
    prices = {partition.name: partition.price_per_hour for partition in spec.partitions}
    hosts = [_controller(spec.controller_host, found, off)]
    hosts += [_node(share, prices[share.partition], found, off) for share in shares]
    gone = (name for name in found.nodes if name != spec.controller_host and name not in wanted)
    return (*hosts, *(_gone(name, prices, found) for name in gone))


def _controller(name: str, found: Existing, off: Collection[str]) -> HostChange:
    if name not in found.nodes:
        return HostChange(name, "make", _CONTROLLER)
    if name in off:
        return HostChange(name, "change", _CONTROLLER, _OFF, off=True)
    return HostChange(name, "keep", _CONTROLLER)


def _node(share: Share, price: float | None, found: Existing, off: Collection[str]) -> HostChange:
    name, size = share.host, Size(share.cpus, share.memory_mib, share.disk_mib)
    what = _words(size)
    if name not in found.nodes:
        return HostChange(name, "make", what, usd_per_hour=price)
    if found.nodes[name] != size.disk_mib:
        return HostChange(name, "replace", what, _disks(found.nodes[name], size.disk_mib), price)
    why = [*([_OFF] if name in off else []), *_differences(found.hosts.get(name), size)]
    return HostChange(name, "change" if why else "keep", what, "; ".join(why), price, off=name in off)


def _gone(name: str, prices: Mapping[str, float | None], found: Existing) -> HostChange:
    host = found.hosts.get(name)
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
