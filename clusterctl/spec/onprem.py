"""On-premises machines in a spec: `provider: {type: onprem, ...}`, and what must hold between its fields."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import IPv4Network, ip_address
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator

from clusterctl.errors import UsageError
from clusterctl.spec import checks
from clusterctl.spec.base import KeyFile, Model, Network, ProviderSettings, expand
from clusterctl.spec.checks import Raw
from clusterctl.spec.messages import Finding, Loc, did_you_mean, dotted, shown

_SWITCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def _is_range(text: str) -> str:
    expand(text)
    return text


def _is_name(text: str) -> str:
    if not _SWITCH_NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no switch's name: at most 63 letters, digits, dashes or underscores")
    return text


HostRange = Annotated[str, AfterValidator(_is_range)]
SwitchName = Annotated[str, AfterValidator(_is_name)]


class Switch(Model):
    """One switch, and what is plugged into it."""

    hosts: HostRange | None = Field(None, description="the nodes at this switch, such as gpu[01-08]")
    switches: HostRange | None = Field(None, description="the switches at this one, such as leaf[1-4]")


def _fabric(spec: Raw) -> Iterator[Finding]:
    """What is wrong with ``provider.fabric``."""
    fabric = checks.mapping(checks.mapping(spec, "provider"), "fabric")
    switches = {str(name): said if isinstance(said, Mapping) else {} for name, said in fabric.items()}
    nodes = {host for p in checks.entries(spec, "partitions") for host in _expanded(p.get("hosts"))}
    placed: dict[str, str] = {}
    for kind, known, what in (("hosts", nodes, "node"), ("switches", set(switches), "switch")):
        placed.clear()
        for name, said in switches.items():
            at = ("provider", "fabric", name, kind)
            for one in _expanded(said.get(kind)):
                if known and one not in known:
                    yield Finding(at, f"there is no {what} {shown(one)}", did_you_mean(one, known))
                elif one in placed:
                    yield Finding(at, f"{one} is at {placed[one]} already", f"a {what} is at one switch")
                placed.setdefault(one, name)
        if kind == "hosts" and switches and (left := sorted(nodes - set(placed))):
            message = f"{', '.join(left[:3])}{' and more' if len(left) > 3 else ''}: at no switch"  # noqa: PLR2004
            yield Finding(
                ("provider", "fabric"), message, "name every node, or leave fabric out", at_key=True
            )
    yield from _shape(switches, placed)


def _shape(switches: Mapping[str, Raw], above: Mapping[str, str]) -> Iterator[Finding]:
    """Each switch has something at it, of one kind, and none is above itself."""
    for name, said in switches.items():
        at = ("provider", "fabric", name)
        if (said.get("hosts") is None) == (said.get("switches") is None):
            hint = "write hosts: RANGE of a switch with nodes, switches: RANGE of one above others"
            yield Finding(at, "a switch has either hosts or switches", hint, at_key=True)
        seen, upward = {name}, above.get(name)
        while upward is not None and upward not in seen:
            seen.add(upward)
            upward = above.get(upward)
        if upward == name:
            yield Finding(at, f"{name} is above itself", "a fabric is a tree", at_key=True)


HOST_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
ADDRESS = r"^[A-Za-z0-9._:\[\],-]{1,255}$"
LOGIN = r"^[a-z_][a-z0-9_.-]{0,31}$"
JUMP = r"^([a-z_][a-z0-9_.-]{0,31}@)?[A-Za-z0-9][A-Za-z0-9._-]{0,252}(:[0-9]{1,5})?$"
HOST_KEY = r"^(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa) [A-Za-z0-9+/]+={0,2}$"
ABSOLUTE = r"^/[A-Za-z0-9._/-]{0,200}$"
_KEY_FIELDS: Final = {"ssh-ed25519": 2}  # others have three
_HERE: Final = ("localhost", "localhost.localdomain")

ONPREM_PATTERN_TEXTS: Final[Mapping[str, str]] = {
    HOST_NAME: "a host's name: at most 63 lower-case letters, digits or dashes, none at its ends",
    ADDRESS: "an address or a name, such as 10.0.0.11",
    LOGIN: "a login name",
    JUMP: "a host to jump through, as user@gate.example.org:22",
    HOST_KEY: "a public host key, as `ssh-keyscan` prints it: ssh-ed25519 AAAA...",
    ABSOLUTE: "an absolute path",
}


def _are_addresses(text: str) -> str:
    for one in expand(text):
        if re.fullmatch(r"[0-9.]+|.*:.*", one):  # what no name looks like
            try:
                ip_address(one)
            except ValueError as exc:
                raise ValueError(
                    f"{shown(one)} is not an address, such as 10.0.0.11; `port` is apart"
                ) from exc
    return text


def _is_whole_key(text: str) -> str:
    """A key's fields, the first of which is its type again, are a length and as many bytes each."""
    kind, _, encoded = text.partition(" ")
    with suppress(ValueError):
        left, fields = b64decode(encoded, validate=True), []
        while left:
            length = int.from_bytes(left[:4], "big")
            fields.append(left[4 : 4 + length])
            if len(left) < 4 + length:
                break
            left = left[4 + length :]
        if not left and fields[0] == kind.encode() and len(fields) == _KEY_FIELDS.get(kind, 3):
            return text
    raise ValueError(f"{shown(text)} is no whole key of that type: copy it as `ssh-keyscan` prints it")


HostName = Annotated[str, StringConstraints(pattern=HOST_NAME)]
Login = Annotated[str, StringConstraints(pattern=LOGIN)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Jump = Annotated[str, StringConstraints(pattern=JUMP)]
AbsolutePath = Annotated[str, StringConstraints(pattern=ABSOLUTE)]


class Access(Model):
    """The first login to a host; after it clusterctl uses an admin account of its own."""

    user: Login | None = Field(None, description="login name; by default the caller's")
    port: Port = Field(22, description="sshd's port")
    key: KeyFile | None = Field(
        None, description="private key, relative to this file or from ~; by default ssh's own and the agent's"
    )
    jump: tuple[Jump, ...] = Field((), description="hosts to jump through, the first one first")
    become: Literal["sudo", "none"] = Field("sudo", description="how to become root; none: the user is root")


class OnpremHost(Model):
    """One machine, or a range of machines. Fields that are left out are as under `provider`."""

    address: Annotated[str, StringConstraints(pattern=ADDRESS), AfterValidator(_are_addresses)] | None = (
        Field(
            None,
            description="address, or a range of as many as there are names; by default the host's name; "
            "localhost: the machine that clusterctl runs on",
        )
    )
    user: Login | None = Field(None, description="login name")
    port: Port | None = Field(None, description="sshd's port")
    key: KeyFile | None = Field(None, description="private key")
    jump: tuple[Jump, ...] | None = Field(None, description="hosts to jump through; [] for none")
    become: Literal["sudo", "none"] | None = Field(None, description="how to become root")
    host_key: Annotated[str, StringConstraints(pattern=HOST_KEY), AfterValidator(_is_whole_key)] | None = (
        Field(None, description="its public host key; by default it is shown once, to be confirmed")
    )

    @property
    def is_here(self) -> bool:
        """Whether it is the machine that clusterctl runs on."""
        return self.address is not None and is_this_machine(self.address)


class OnpremShared(Model):
    """The shared folder of all hosts."""

    kind: Literal["nfs", "existing", "none"] = Field(
        "nfs",
        description="nfs: `server`, or else the controller, exports it; existing: it is mounted on all hosts "
        "already; none: jobs have the folders of their own nodes alone",
    )
    path: AbsolutePath = Field("/shared", description="where the hosts have it")
    server: Annotated[str, StringConstraints(pattern=ADDRESS)] | None = Field(
        None, description="an existing NFS server"
    )
    export: AbsolutePath | None = Field(None, description="the path that this server exports")


class OnpremProvider(ProviderSettings):
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
        """Every host by its own name, with its own address, and the access of ``access`` where it has none.

        ``key``, ``jump`` and the rest are resolved; ``user`` stays None for the caller's.
        """
        return {name: host for names, said in self.hosts.items() for name, host in self._each(names, said)}

    def controller_of(self, cluster: str) -> str:  # noqa: ARG002
        """The host that ``controller`` names."""
        return self.controller

    @property
    def known_network(self) -> IPv4Network | None:
        """The network that the spec names."""
        return self.network

    @property
    def switches(self) -> Mapping[str, Switch]:
        """The switches of ``fabric``."""
        return self.fabric

    @classmethod
    def findings(cls, spec: Raw) -> Iterator[Finding]:
        """The cross-field faults of a spec for machines of the user's own."""
        provider = checks.mapping(spec, "provider")
        names = _names(provider)
        yield from _hosts(provider)
        yield from _this_machine(provider, names)
        yield from _roles(provider, names)
        yield from _partitions(spec, names)
        yield from _shared(provider)
        yield from _fabric(spec)

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


def own_machines(provider: ProviderSettings) -> OnpremProvider:
    """The settings of hosts that are the user's own.

    Raises:
        UsageError: the provider creates and removes its hosts.
    """
    if isinstance(provider, OnpremProvider):
        return provider
    raise UsageError(
        f"the nodes of a {provider.type} cluster are created and removed by its spec",
        where="provider.type",
        fix="change `nodes` of its partitions, and run `clusterctl up`",
    )


def is_this_machine(address: str) -> bool:
    """Whether an address leads to where one is already: localhost, 127.0.0.1, ::1, or any of its own."""
    bare = address.strip("[]").lower()
    if bare in _HERE:
        return True
    try:
        found = ip_address(bare)
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return found.is_loopback or found.is_unspecified


_SYSTEM: Final = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "usr"}
)
_TOP: Final = frozenset({"home", "media", "mnt", "opt", "srv", "tmp", "var"})  # below them it is fine
_DECIDED_BY_HARDWARE: Final = ("cpus", "memory", "disk")
_WAY_THERE: Final = ("user", "port", "key", "jump", "host_key")
_UNSAID: Final[tuple[object, ...]] = (None, 22, (), [])  # by default, once it is filled in


def _names(provider: Raw) -> dict[str, str]:
    """Host -> the key that names it."""
    return {name: str(key) for key in checks.mapping(provider, "hosts") for name in _expanded(key)}


def _expanded(text: object) -> tuple[str, ...]:
    """The names of a range; none where it is malformed, which is said elsewhere."""
    try:
        return expand(text) if isinstance(text, str) else ()
    except ValueError:
        return ()


def _hosts(provider: Raw) -> Iterator[Finding]:
    first: dict[str, str] = {}
    places: dict[tuple[str, object], str] = {}
    for key, said in checks.mapping(provider, "hosts").items():
        at = ("provider", "hosts", str(key))
        names = _expanded(key)
        for name in names:
            if name in first:
                yield Finding(at, f"{name} is in {first[name]} already", "name every host once", at_key=True)
            first[name] = str(key)
        host: Raw = said if isinstance(said, Mapping) else {"address": said}
        address = host.get("address")
        addresses = _expanded(address) if address is not None else names
        if names and addresses and len(addresses) != len(names):
            message = f"{len(names)} hosts have {len(addresses)} addresses"
            yield Finding((*at, "address"), message, "write a range of as many addresses as there are names")
            continue
        for name, one in zip(names, addresses, strict=False):
            place = (one, host.get("port", checks.mapping(provider, "access").get("port", 22)))
            if places.get(place, name) != name:
                message = f"{name} has the address of {places[place]}"
                yield Finding(at, message, "give every host an address of its own", at_key=True)
            places[place] = name


def _this_machine(provider: Raw, names: Mapping[str, str]) -> Iterator[Finding]:
    """The machine itself is a whole cluster: others would not find it under an address of its own alone."""
    for key, said in checks.mapping(provider, "hosts").items():
        host: Raw = said if isinstance(said, Mapping) else {"address": said}
        address = host.get("address") or key
        if not isinstance(address, str) or not is_this_machine(address):
            continue
        at = ("provider", "hosts", str(key))
        if key == "localhost":
            message = "every machine calls itself localhost"
            yield Finding(at, message, "give it a name: desk: {address: localhost}", at_key=True)
        if len(names) > 1:
            message = f"{address} is this machine itself, and others can't reach it under that"
            yield Finding(
                at, message, "write its address on their network, or leave the others out", at_key=True
            )
        for where, given in ((at, host), (("provider", "access"), checks.mapping(provider, "access"))):
            for field in _WAY_THERE:
                if given.get(field) not in _UNSAID:
                    message = f"{field} is for hosts that are logged in to, and {address} is this machine"
                    fix = f"remove it, or write an address of the other machine that is not {address}"
                    yield Finding((*where, field), message, fix, at_key=True)


def _roles(provider: Raw, names: Mapping[str, str]) -> Iterator[Finding]:
    asked: list[tuple[Loc, object]] = [(("controller",), provider.get("controller"))]
    asked += [(("login", index), name) for index, name in enumerate(checks.items(provider.get("login")))]
    for where, name in asked:
        if isinstance(name, str) and names and name not in names:
            hint = did_you_mean(name, names) or "name it under provider.hosts"
            yield Finding(("provider", *where), f"there is no host {shown(name)}", hint)


def _partitions(spec: Raw, names: Mapping[str, str]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for index, partition in enumerate(checks.entries(spec, "partitions")):
        at = ("partitions", index)
        for key in _DECIDED_BY_HARDWARE:
            if partition.get(key) is not None:
                yield Finding(
                    (*at, key), f"{key} is for local nodes", "remove it; the machine decides", at_key=True
                )
        if partition.get("hosts") is None:
            yield Finding(
                at, "which hosts are its nodes?", "write hosts: RANGE, such as gpu[01-08]", at_key=True
            )
            continue
        hosts = _expanded(partition["hosts"])
        nodes = checks.whole(partition, "nodes")
        if hosts and nodes is not None and nodes != len(hosts):
            yield Finding((*at, "nodes"), f"hosts names {len(hosts)}, not {nodes}", "remove nodes")
        for host in hosts:
            if names and host not in names:
                hint = did_you_mean(host, names) or "name it under provider.hosts"
                yield Finding((*at, "hosts"), f"there is no host {shown(host)}", hint)
            elif host in first:
                yield Finding(
                    (*at, "hosts"), f"{host} is in {first[host]} already", "a node is in one partition"
                )
            else:
                first[host] = dotted(at)


def _shared(provider: Raw) -> Iterator[Finding]:
    shared = checks.mapping(provider, "shared")
    kind, at = shared.get("kind", "nfs"), ("provider", "shared")
    for key in ("server", "export"):
        if kind != "nfs" and shared.get(key) is not None:
            yield Finding((*at, key), f"{key} is for kind: nfs", "remove it", at_key=True)
    if kind == "nfs" and (shared.get("server") is None) != (shared.get("export") is None):
        hint = "write both, or neither: then the controller exports a folder of its own"
        yield Finding(at, "server and export belong together", hint, at_key=True)
    path = checks.text(shared, "path")
    if kind == "nfs" and path is not None and _is_the_systems(path):
        message = f"{shown(path)} is a system folder, and would be exported to all hosts"
        yield Finding((*at, "path"), message, "name a folder for the cluster, such as /shared")


def _is_the_systems(path: str) -> bool:
    """Whether a folder holds the system, or is one of those that do."""
    parts = PurePosixPath(path).parts[1:]
    return not parts or parts[0] in _SYSTEM or (len(parts) == 1 and parts[0] in _TOP)
