"""On-premises machines in a spec: `provider: {type: onprem, ...}`, and what must hold between its fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, field_validator

from clusterctl.errors import BadValueError, UsageError
from clusterctl.spec.base import PATTERNS, Fault, Loc, Model, Network, dotted
from clusterctl.spec.common import Cluster, ProviderSettings
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


def _is_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", text):
        raise BadValueError(
            "not-a-switch-name",
            f"{text!r} is no switch's name: at most 63 letters, digits, dashes or underscores",
        )
    return text


SwitchName = Annotated[str, AfterValidator(_is_name)]
AbsolutePath = Annotated[str, PATTERNS["absolute_path"]]


class OnpremShared(Model):
    """The shared folder of all hosts."""

    kind: Literal["nfs", "existing", "none"] = Field(
        "nfs",
        description="nfs: `server`, or else the controller, exports it; existing: it is mounted on all hosts "
        "already; none: jobs have the folders of their own nodes alone",
    )
    path: AbsolutePath = Field("/shared", description="where the hosts have it")
    server: Address | None = Field(None, description="an existing NFS server")
    export: AbsolutePath | None = Field(None, description="the path that this server exports")


class OnpremSettings(ProviderSettings):
    """Your own machines: Rocky Linux, Debian or Ubuntu. See docs/onprem.md."""

    user_owned: ClassVar[bool] = True

    type: Literal["onprem"] = Field(description="the provider's type")
    controller: HostName = Field(description="the host that runs slurmctld; it may be a compute node, too")
    login: tuple[HostName, ...] = Field((), description="login nodes beside the controller")
    hosts: Mapping[HostRange, OnpremHost] = Field(
        min_length=1, description="the machines by name or range of names, such as gpu[01-08]"
    )
    access: Access = Field(Access(), description="the first login to them")
    network: Network | None = Field(
        None, description="network that MPI and Slurm use; by default that of the controller's address"
    )
    shared: OnpremShared = Field(OnpremShared(), description="the shared folder of all hosts")
    fabric: Mapping[SwitchName, Switch] = Field(
        {}, description="the switches of the fast network by name, for jobs to be kept close together"
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _bare_addresses(cls, value: object) -> object:
        """``gpu01: 10.0.0.11`` says the address alone, ``gpu01:`` nothing."""
        if not isinstance(value, Mapping):
            return value
        return {
            name: {"address": said} if isinstance(said, str) else {} if said is None else said
            for name, said in value.items()
        }

    @property
    def machines(self) -> Mapping[str, OnpremHost]:
        """With its own address, and the access of ``access`` where it has none; ``user`` may be None."""
        return {name: host for names, said in self.hosts.items() for name, host in self._each(names, said)}

    def controller_of(self, cluster: str) -> str:  # noqa: ARG002
        return self.controller

    @property
    def known_network(self) -> IPv4Network | None:
        return self.network

    @property
    def switches(self) -> Mapping[str, Switch]:
        return self.fabric

    def faults(self, spec: Cluster) -> Iterator[Fault]:
        names = {name: key for key in self.hosts for name in expand(key)}
        yield from _hosts(self)
        yield from _this_machine(self, names)
        yield from _unknown(("provider", "controller"), self.controller, names)
        for index, name in enumerate(self.login):
            yield from _unknown(("provider", "login", index), name, names)
        yield from spec.refused(_OF_LOCAL_NODES)
        yield from _partitions(spec, names)
        yield from _shared(self, spec)
        yield from _fabric(self.fabric, spec)

    def _each(self, names: str, said: OnpremHost) -> tuple[tuple[str, OnpremHost], ...]:
        every = expand(names)
        addresses = expand(said.address) if said.address else every
        common = {
            field: getattr(self.access, field) if getattr(said, field) is None else getattr(said, field)
            for field in ("user", "port", "key", "jump", "become")
        }
        return tuple(
            (name, OnpremHost(address=address, host_key=said.host_key, **common))
            for name, address in zip(every, addresses, strict=True)
        )


def own_machines(provider: ProviderSettings) -> OnpremSettings:
    """The settings of hosts that are the user's own.

    Raises:
        UsageError: the provider creates and removes its hosts.
    """
    if isinstance(provider, OnpremSettings):
        return provider
    raise UsageError(
        f"the nodes of a {provider.type} cluster are created and removed by its spec",
        code="not-own-machines",
        where="provider.type",
        fix="change `nodes` of its partitions, and run `clusterctl up`",
    )


_SYSTEM: Final = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "usr"}
)
_TOP: Final = frozenset({"home", "media", "mnt", "opt", "srv", "tmp", "var"})  # below them it is fine
_OF_LOCAL_NODES: Final = tuple(
    (f"partitions.{key}", f"{key} is for local nodes", "remove it; the machine decides")
    for key in ("cpus", "memory", "disk")
)
_WAY_THERE: Final = ("user", "port", "key", "jump", "host_key")
_UNSAID: Final = (None, 22, ())  # by default, once it is filled in


def _hosts(provider: OnpremSettings) -> Iterator[Fault]:
    first: dict[str, str] = {}
    places: dict[tuple[str, int], str] = {}
    for key, host in provider.hosts.items():
        at, names = ("provider", "hosts", key), expand(key)
        for name in names:
            if name in first:
                twice = f"{name} is in {first[name]} already"
                yield Fault("host-named-twice", at, twice, "name every host once", at_key=True)
            first[name] = key
        addresses = names if host.address is None else _expanded(host.address)
        if addresses and len(addresses) != len(names):
            message = f"{len(names)} hosts have {len(addresses)} addresses"
            hint = "write a range of as many addresses as there are names"
            yield Fault("address-count", (*at, "address"), message, hint)
            continue
        for name, one in zip(names, addresses, strict=False):
            place = (one, provider.access.port if host.port is None else host.port)
            if places.get(place, name) != name:
                message = f"{name} has the address of {places[place]}"
                yield Fault(
                    "address-twice", at, message, "give every host an address of its own", at_key=True
                )
            places[place] = name


def _expanded(text: str | None) -> tuple[str, ...]:
    return expand(text) if text else ()


def _this_machine(provider: OnpremSettings, names: Mapping[str, str]) -> Iterator[Fault]:
    """The machine itself is a whole cluster: others would not find it under an address of its own alone."""
    for key, host in provider.hosts.items():
        at, address = ("provider", "hosts", key), host.address or key
        if not is_this_machine(address):
            continue
        if key == "localhost":
            message = "every machine calls itself localhost"
            yield Fault(
                "host-is-localhost", at, message, "give it a name: desk: {address: localhost}", at_key=True
            )
        if len(names) > 1:
            message = f"{address} is this machine itself, and others can't reach it under that"
            fix = "write its address on their network, or leave the others out"
            yield Fault("localhost-among-others", at, message, fix, at_key=True)
        for where, given in ((at, host), (("provider", "access"), provider.access)):
            for field in _WAY_THERE:
                if getattr(given, field, None) not in _UNSAID:
                    message = f"{field} is for hosts that are logged in to, and {address} is this machine"
                    fix = f"remove it, or write an address of the other machine that is not {address}"
                    yield Fault("localhost-login", (*where, field), message, fix, at_key=True)


def _unknown(at: Loc, host: str, names: Mapping[str, str]) -> Iterator[Fault]:
    if host and names and host not in names:
        hint = did_you_mean(host, names) or "name it under provider.hosts"
        yield Fault("unknown-host", at, f"there is no host {shown(host)}", hint)


def _partitions(spec: Cluster, names: Mapping[str, str]) -> Iterator[Fault]:
    first: dict[str, str] = {}
    for index, partition in enumerate(spec.partitions):
        at = ("partitions", index)
        if partition.hosts is None:
            hint = "write hosts: RANGE, such as gpu[01-08]"
            yield Fault("partition-without-hosts", at, "which hosts are its nodes?", hint, at_key=True)
        hosts = _expanded(partition.hosts)
        if hosts and partition.nodes and partition.nodes != len(hosts):
            message = f"hosts names {len(hosts)}, not {partition.nodes}"
            yield Fault("node-count", (*at, "nodes"), message, "remove nodes")
        for host in hosts:
            unknown = [*_unknown((*at, "hosts"), host, names)]
            yield from unknown
            if not unknown and first.setdefault(host, dotted(at)) != dotted(at):
                message = f"{host} is in {first[host]} already"
                yield Fault("node-in-two-partitions", (*at, "hosts"), message, "a node is in one partition")


def _shared(provider: OnpremSettings, spec: Cluster) -> Iterator[Fault]:
    shared, at = provider.shared, ("provider", "shared")
    for key in ("server", "export"):
        if shared.kind != "nfs" and getattr(shared, key) is not None:
            yield Fault("needs-nfs", (*at, key), f"{key} is for kind: nfs", "remove it", at_key=True)
    if shared.kind == "nfs" and (shared.server is None) != (shared.export is None):
        hint = "write both, or neither: then the controller exports a folder of its own"
        yield Fault("nfs-incomplete", at, "server and export belong together", hint, at_key=True)
    if shared.kind == "nfs" and shared.path and _is_the_systems(shared.path):
        message = f"{shown(shared.path)} is a system folder, and would be exported to all hosts"
        yield Fault(
            "shared-system-folder", (*at, "path"), message, "name a folder for the cluster, such as /shared"
        )
    if spec.storage.keep and shared.kind == "none":
        message = "there is no shared folder to keep"
        yield Fault(
            "no-storage-to-keep", ("storage", "keep"), message, "remove it, or write shared: {kind: nfs}"
        )
    is_one_host = all(partition.hosts == provider.controller for partition in spec.partitions)
    if spec.scheduler == "none" and shared.kind == "none" and not is_one_host:
        message = "without Slurm, jobs need a folder that all hosts see"
        yield Fault(
            "needs-shared-folder", (*at, "kind"), message, "write kind: nfs, or write scheduler: slurm"
        )


def _is_the_systems(path: str) -> bool:
    parts = PurePosixPath(path).parts[1:]
    return not parts or parts[0] in _SYSTEM or (len(parts) == 1 and parts[0] in _TOP)


def _fabric(switches: Mapping[str, Switch], spec: Cluster) -> Iterator[Fault]:
    nodes = {host for partition in spec.partitions for host in _expanded(partition.hosts)}
    placed: dict[str, str] = {}
    for kind, known, what in (("hosts", nodes, "node"), ("switches", set(switches), "switch")):
        placed.clear()
        for name, switch in switches.items():
            at = ("provider", "fabric", name, kind)
            for one in _expanded(getattr(switch, kind)):
                if known and one not in known:
                    yield Fault(
                        "unknown-in-fabric", at, f"there is no {what} {shown(one)}", did_you_mean(one, known)
                    )
                elif one in placed:
                    twice = f"{one} is at {placed[one]} already"
                    yield Fault("fabric-placed-twice", at, twice, f"a {what} is at one switch")
                placed.setdefault(one, name)
        if kind == "hosts" and switches and (left := sorted(nodes - set(placed))):
            message = f"{', '.join(left[:3])}{' and more' if len(left) > 3 else ''}: at no switch"  # noqa: PLR2004
            hint = "name every node, or leave fabric out"
            yield Fault("fabric-incomplete", ("provider", "fabric"), message, hint, at_key=True)
    yield from _shape(switches, placed)


def _shape(switches: Mapping[str, Switch], above: Mapping[str, str]) -> Iterator[Fault]:
    """Each switch has something at it, of one kind, and none is above itself."""
    for name, switch in switches.items():
        at = ("provider", "fabric", name)
        if (switch.hosts is None) == (switch.switches is None):
            hint = "write hosts: RANGE of a switch with nodes, switches: RANGE of one above others"
            yield Fault("fabric-mixed-switch", at, "a switch has either hosts or switches", hint, at_key=True)
        seen, upward = {name}, above.get(name)
        while upward is not None and upward not in seen:
            seen.add(upward)
            upward = above.get(upward)
        if upward == name:
            yield Fault("fabric-cycle", at, f"{name} is above itself", "a fabric is a tree", at_key=True)
