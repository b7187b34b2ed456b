"""The settings of on-premises machines in a spec, `provider: {type: onprem, ...}`, and their
checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, field_validator

from clusterctl.errors import BadValueError
from clusterctl.spec.base import PATTERNS, Loc, Network, SpecFault, SpecModel, dotted
from clusterctl.spec.common import ClusterBase, ProviderSettings, Refusal
from clusterctl.spec.hosts import (
    Access,
    Address,
    HostName,
    HostRange,
    OnpremHost,
    Switch,
    expand,
    is_this_machine,
)
from clusterctl.spec.names import did_you_mean
from clusterctl.spec.units import shown
from clusterctl.util.numbers import counted


def _is_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", text):
        raise BadValueError(
            "not-a-switch-name",
            f"{text!r} is not a valid switch name: use at most 63 letters, digits, dashes or "
            "underscores",
        )
    return text


SwitchName = Annotated[str, AfterValidator(_is_name)]
AbsolutePath = Annotated[str, PATTERNS["absolute_path"]]


_STORAGE: Final = ("storage.name", "your machines keep all home folders anyway", "remove name")
_OF_LOCAL_NODES: Final = tuple(
    (f"partitions.{key}", f"{key} is only for local nodes", f"remove {key}; clusterctl measures it")
    for key in ("cpus", "memory")
)


class OnpremShared(SpecModel):
    """The shared folder of all hosts."""

    kind: Literal["nfs", "existing", "none"] = Field(
        "nfs",
        description="nfs: `server`, or by default the controller, exports it; existing: all hosts have "
        "mounted it already; none: jobs see only the folders of their own nodes",
    )
    path: AbsolutePath = Field("/shared", description="its path on the hosts")
    server: Address | None = Field(None, description="an existing NFS server")
    export: AbsolutePath | None = Field(None, description="the path that this server exports")


class OnpremSettings(ProviderSettings):
    """Your own machines: Rocky Linux, Debian or Ubuntu. See docs/onprem.md."""

    refuses: ClassVar[tuple[Refusal, ...]] = (*_OF_LOCAL_NODES, _STORAGE)
    foreign: ClassVar[bool] = False
    adopts_hosts: ClassVar[bool] = True
    may_have_fabric: ClassVar[bool] = True
    shares_kernel: ClassVar[bool] = False
    is_cloud: ClassVar[bool] = False
    late_account_fix: ClassVar[str] = ""
    first_verb: ClassVar[str] = "up"
    default_uid: ClassVar[int | None] = None

    type: Literal["onprem"] = Field(description="the provider's type")
    controller: HostName = Field(
        description="the host that runs slurmctld; it may also be a compute node"
    )
    login: tuple[HostName, ...] = Field((), description="login nodes in addition to the controller")
    hosts: Mapping[HostRange, OnpremHost] = Field(
        min_length=1, description="the machines by name or range of names, such as gpu[01-08]"
    )
    access: Access = Field(Access(), description="the first login to the hosts")
    network: Network | None = Field(
        None,
        description="network for MPI and Slurm; by default the network of the controller's address",
    )
    shared: OnpremShared = Field(OnpremShared(), description="the shared folder of all hosts")
    fabric: Mapping[SwitchName, Switch] = Field(
        {}, description="the switches of the fast network by name; Slurm places jobs close together"
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _bare_addresses(cls, value: object) -> object:
        """Accept ``gpu01: 10.0.0.11`` as an address, and ``gpu01:`` as a host without settings."""
        if not isinstance(value, Mapping):
            return value
        return {
            name: {"address": entry} if isinstance(entry, str) else {} if entry is None else entry
            for name, entry in value.items()
        }

    @property
    def keys(self) -> frozenset[str]:
        named = (self.access.key, *(host.key for host in self.hosts.values()))
        return frozenset(key for key in named if key is not None)

    @property
    def machines(self) -> Mapping[str, OnpremHost]:
        """Host name -> address and login. ``access`` supplies the settings that a host's entry
        omits.
        """
        pairs = (
            pair for names, settings in self.hosts.items() for pair in self._each(names, settings)
        )
        return dict(pairs)

    def controller_of(self, cluster: str) -> str:  # noqa: ARG002
        return self.controller

    @property
    def known_network(self) -> IPv4Network | None:
        return self.network

    @property
    def switches(self) -> Mapping[str, Switch]:
        return self.fabric

    def faults(self, spec: ClusterBase) -> Iterator[SpecFault]:
        names = {name: key for key in self.hosts for name in expand(key)}
        yield from _host_faults(self)
        yield from _localhost_faults(self, names)
        yield from _unknown_host_fault(("provider", "controller"), self.controller, names)
        for index, name in enumerate(self.login):
            yield from _unknown_host_fault(("provider", "login", index), name, names)
        yield from _partition_faults(spec, names)
        yield from _shared_folder_faults(self, spec)
        yield from _fabric_faults(self.fabric, spec)

    def _each(self, names: str, settings: OnpremHost) -> tuple[tuple[str, OnpremHost], ...]:
        every = expand(names)
        addresses = expand(settings.address) if settings.address else every
        common = {
            field: getattr(self.access if getattr(settings, field) is None else settings, field)
            for field in ("user", "port", "key", "become")
        }
        return tuple(
            (name, OnpremHost(address=address, host_key=settings.host_key, **common))
            for name, address in zip(every, addresses, strict=True)
        )


_SYSTEM: Final = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "usr"}
)
# Folders that can't be the shared folder themselves, but may contain it.
_TOP: Final = frozenset({"home", "media", "mnt", "opt", "srv", "tmp", "var"})
_WAY_THERE: Final = ("user", "port", "key", "host_key")
# The values of these fields if they are not set.
_UNSAID: Final = (None, 22)


def _host_faults(provider: OnpremSettings) -> Iterator[SpecFault]:
    first: dict[str, str] = {}
    places: dict[tuple[str, int], str] = {}
    for key, host in provider.hosts.items():
        at = ("provider", "hosts", key)
        names = expand(key)
        for name in names:
            if name in first:
                message = f"host {name} is already in {first[name]}"
                yield SpecFault("host-named-twice", at, message, "list each host once", at_key=True)
            first[name] = key
        addresses = names if host.address is None else _expanded(host.address)
        if addresses and len(addresses) != len(names):
            message = (
                f"there are {counted(len(names), 'host')}, but "
                f"{counted(len(addresses), 'address', 'addresses')}"
            )
            hint = f"write a range of {len(names)} addresses"
            yield SpecFault("address-count", (*at, "address"), message, hint)
            continue
        for name, address in zip(names, addresses, strict=False):
            place = (address, provider.access.port if host.port is None else host.port)
            if places.get(place, name) != name:
                message = f"{name} has the same address as {places[place]}"
                yield SpecFault(
                    "address-twice", at, message, "give each host a different address", at_key=True
                )
            places[place] = name


def _expanded(text: str | None) -> tuple[str, ...]:
    return expand(text) if text else ()


def _localhost_faults(provider: OnpremSettings, names: Mapping[str, str]) -> Iterator[SpecFault]:
    """Yield faults if a host has a loopback address although there are other hosts or SSH
    settings.
    """
    for key, host in provider.hosts.items():
        at = ("provider", "hosts", key)
        address = host.address or key
        if not is_this_machine(address):
            continue
        if key == "localhost":
            message = "localhost can't be the name of a host"
            yield SpecFault(
                "host-is-localhost", at, message, "write NAME: {address: localhost}", at_key=True
            )
        if len(names) > 1:
            message = f"the other hosts can't reach this machine by the address {address}"
            fix = "write this machine's network address, or remove the other hosts"
            yield SpecFault("localhost-among-others", at, message, fix, at_key=True)
        for where, settings in ((at, host), (("provider", "access"), provider.access)):
            for field in _WAY_THERE:
                if getattr(settings, field, None) not in _UNSAID:
                    message = (
                        f"{field} is only for SSH, which is not used for this machine ({address})"
                    )
                    fix = (
                        f"remove {field}, or write the address of another machine instead of "
                        f"{address}"
                    )
                    yield SpecFault("localhost-login", (*where, field), message, fix, at_key=True)


def _unknown_host_fault(at: Loc, host: str, names: Mapping[str, str]) -> Iterator[SpecFault]:
    if host and names and host not in names:
        hint = did_you_mean(host, names) or "add it to provider.hosts"
        yield SpecFault("unknown-host", at, f"there is no host {shown(host)}", hint)


def _partition_faults(spec: ClusterBase, names: Mapping[str, str]) -> Iterator[SpecFault]:
    first: dict[str, str] = {}
    for index, partition in enumerate(spec.partitions):
        at = ("partitions", index)
        if partition.hosts is None:
            hint = "write hosts: RANGE, such as gpu[01-08]"
            yield SpecFault(
                "partition-without-hosts", at, "the partition has no hosts", hint, at_key=True
            )
        hosts = _expanded(partition.hosts)
        if hosts and partition.nodes and partition.nodes != len(hosts):
            message = f"nodes is {partition.nodes}, but hosts lists {counted(len(hosts), 'host')}"
            yield SpecFault("node-count", (*at, "nodes"), message, "remove the key nodes")
        for host in hosts:
            unknown = [*_unknown_host_fault((*at, "hosts"), host, names)]
            yield from unknown
            if not unknown and first.setdefault(host, dotted(at)) != dotted(at):
                message = f"node {host} is already in {first[host]}"
                fix = "put each node into a single partition"
                yield SpecFault("node-in-two-partitions", (*at, "hosts"), message, fix)


def _shared_folder_faults(provider: OnpremSettings, spec: ClusterBase) -> Iterator[SpecFault]:
    shared = provider.shared
    at = ("provider", "shared")
    for key in ("server", "export"):
        if shared.kind != "nfs" and getattr(shared, key) is not None:
            yield SpecFault(
                "needs-nfs",
                (*at, key),
                f"{key} is only for kind: nfs",
                f"remove {key}",
                at_key=True,
            )
    if shared.kind == "nfs" and (shared.server is None) != (shared.export is None):
        hint = "set both, or leave out both, and the controller exports a folder"
        yield SpecFault(
            "nfs-incomplete", at, "server and export must be set together", hint, at_key=True
        )
    if shared.server and ":" in shared.server:
        message = f"the hosts mount the NFS server by IPv4, and {shown(shared.server)} is IPv6"
        fix = "write the server's IPv4 address, or its name"
        yield SpecFault("ipv6-server", (*at, "server"), message, fix)
    if shared.kind == "nfs" and shared.path and _is_system_folder(shared.path):
        message = f"{shown(shared.path)} is a system folder and can't be exported to all hosts"
        yield SpecFault(
            "shared-system-folder", (*at, "path"), message, "use another folder, such as /shared"
        )
    is_one_host = all(partition.hosts == provider.controller for partition in spec.partitions)
    if spec.scheduler == "none" and shared.kind == "none" and not is_one_host:
        message = "without Slurm, jobs need a folder that all hosts see"
        fix = "set kind: nfs for shared storage, or scheduler: slurm"
        yield SpecFault("needs-shared-folder", (*at, "kind"), message, fix)


def _is_system_folder(path: str) -> bool:
    parts = PurePosixPath(path).parts[1:]
    return not parts or parts[0] in _SYSTEM or (len(parts) == 1 and parts[0] in _TOP)


def _fabric_faults(switches: Mapping[str, Switch], spec: ClusterBase) -> Iterator[SpecFault]:
    nodes = {host for partition in spec.partitions for host in _expanded(partition.hosts)}
    placed: dict[str, str] = {}
    for kind, allowed, noun in (("hosts", nodes, "node"), ("switches", set(switches), "switch")):
        placed.clear()
        for name, switch in switches.items():
            at = ("provider", "fabric", name, kind)
            for member in _expanded(getattr(switch, kind)):
                if allowed and member not in allowed:
                    message = f"`fabric` refers to a {noun} that does not exist: {shown(member)}"
                    yield SpecFault("unknown-in-fabric", at, message, did_you_mean(member, allowed))
                elif member in placed:
                    message = f"{member} is already at switch {placed[member]}"
                    yield SpecFault(
                        "fabric-placed-twice", at, message, f"put each {noun} at a single switch"
                    )
                placed.setdefault(member, name)
        if kind == "hosts" and switches and (unplaced := sorted(nodes - set(placed))):
            names = f"{', '.join(unplaced[:3])}{' and more' if len(unplaced) > 3 else ''}"  # noqa: PLR2004
            message = f"these nodes are at no switch: {names}"
            hint = "put every node at a switch, or remove fabric"
            yield SpecFault("fabric-incomplete", ("provider", "fabric"), message, hint, at_key=True)
    yield from _switch_faults(switches, placed)


def _switch_faults(switches: Mapping[str, Switch], above: Mapping[str, str]) -> Iterator[SpecFault]:
    """Yield a fault for each switch that is empty, has both hosts and switches, or is in a
    cycle.
    """
    for name, switch in switches.items():
        at = ("provider", "fabric", name)
        if (switch.hosts is None) == (switch.switches is None):
            hint = (
                "write hosts: RANGE for a switch with nodes, or switches: RANGE for a switch "
                "above others"
            )
            message = "a switch needs either hosts or switches"
            yield SpecFault("fabric-mixed-switch", at, message, hint, at_key=True)
        seen = {name}
        upward = above.get(name)
        while upward is not None and upward not in seen:
            seen.add(upward)
            upward = above.get(upward)
        if upward == name:
            hint = "arrange the switches as a tree"
            yield SpecFault("fabric-cycle", at, f"switch {name} is above itself", hint, at_key=True)
