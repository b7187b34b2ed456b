"""What must hold between the fields of a spec for machines of one's own, without asking them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from clusterctl.spec import fabric, plain
from clusterctl.spec.finding import Finding, Loc, dotted
from clusterctl.spec.host_range import expand
from clusterctl.spec.onprem import is_this_machine
from clusterctl.spec.plain import Plain
from clusterctl.spec.words import did_you_mean, shown

_SYSTEM: Final = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "usr"}
)
_TOP: Final = frozenset({"home", "media", "mnt", "opt", "srv", "tmp", "var"})  # below them it is fine
_DECIDED_BY_HARDWARE: Final = ("cpus", "memory", "disk")
_WAY_THERE: Final = ("user", "port", "key", "jump", "host_key")
_UNSAID: Final[tuple[object, ...]] = (None, 22, (), [])  # by default, once it is filled in


def findings(spec: Plain) -> Iterator[Finding]:
    """Every cross-field fault of a spec for machines of one's own given as plain values."""
    provider = plain.mapping(spec, "provider")
    names = _names(provider)
    yield from _hosts(provider)
    yield from _this_machine(provider, names)
    yield from _roles(provider, names)
    yield from _partitions(spec, names)
    yield from _shared(provider)
    yield from fabric.findings(spec, _expanded)


def _names(provider: Plain) -> dict[str, str]:
    """Host -> the key that names it."""
    return {name: str(key) for key in plain.mapping(provider, "hosts") for name in _expanded(key)}


def _expanded(text: object) -> tuple[str, ...]:
    """The names of a range; none where it is malformed, which is said elsewhere."""
    try:
        return expand(text) if isinstance(text, str) else ()
    except ValueError:
        return ()


def _hosts(provider: Plain) -> Iterator[Finding]:
    first: dict[str, str] = {}
    places: dict[tuple[str, object], str] = {}
    for key, said in plain.mapping(provider, "hosts").items():
        at = ("provider", "hosts", str(key))
        names = _expanded(key)
        for name in names:
            if name in first:
                yield Finding(at, f"{name} is in {first[name]} already", "name every host once", at_key=True)
            first[name] = str(key)
        host: Plain = said if isinstance(said, Mapping) else {"address": said}
        address = host.get("address")
        addresses = _expanded(address) if address is not None else names
        if names and addresses and len(addresses) != len(names):
            message = f"{len(names)} hosts have {len(addresses)} addresses"
            yield Finding((*at, "address"), message, "write a range of as many addresses as there are names")
            continue
        for name, one in zip(names, addresses, strict=False):
            place = (one, host.get("port", plain.mapping(provider, "access").get("port", 22)))
            if places.get(place, name) != name:
                message = f"{name} has the address of {places[place]}"
                yield Finding(at, message, "give every host an address of its own", at_key=True)
            places[place] = name


def _this_machine(provider: Plain, names: Mapping[str, str]) -> Iterator[Finding]:
    """The machine itself is a whole cluster: others would not find it under an address of its own alone."""
    for key, said in plain.mapping(provider, "hosts").items():
        host: Plain = said if isinstance(said, Mapping) else {"address": said}
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
        for where, given in ((at, host), (("provider", "access"), plain.mapping(provider, "access"))):
            for field in _WAY_THERE:
                if given.get(field) not in _UNSAID:
                    message = (
                        f"{field} is for machines that are logged in to, and {address} is the one you are on"
                    )
                    fix = f"remove it, or write an address of the other machine that is not {address}"
                    yield Finding((*where, field), message, fix, at_key=True)


def _roles(provider: Plain, names: Mapping[str, str]) -> Iterator[Finding]:
    login = provider.get("login")
    asked: list[tuple[Loc, object]] = [(("controller",), provider.get("controller"))]
    asked += [(("login", i), name) for i, name in enumerate(login if isinstance(login, list | tuple) else ())]
    for where, name in asked:
        if isinstance(name, str) and names and name not in names:
            hint = did_you_mean(name, names) or "name it under provider.hosts"
            yield Finding(("provider", *where), f"there is no host {shown(name)}", hint)


def _partitions(spec: Plain, names: Mapping[str, str]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for index, partition in enumerate(plain.entries(spec, "partitions")):
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
        nodes = plain.whole(partition, "nodes")
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


def _shared(provider: Plain) -> Iterator[Finding]:
    shared = plain.mapping(provider, "shared")
    kind, at = shared.get("kind", "nfs"), ("provider", "shared")
    for key in ("server", "export"):
        if kind != "nfs" and shared.get(key) is not None:
            yield Finding((*at, key), f"{key} is for kind: nfs", "remove it", at_key=True)
    if kind == "nfs" and (shared.get("server") is None) != (shared.get("export") is None):
        hint = "write both, or neither: then the controller exports a folder of its own"
        yield Finding(at, "server and export belong together", hint, at_key=True)
    path = plain.text(shared, "path")
    if kind == "nfs" and path is not None and _is_the_systems(path):
        message = f"{shown(path)} is the system's own, and would be open to all hosts"
        yield Finding((*at, "path"), message, "name a folder for the cluster, such as /shared")


def _is_the_systems(path: str) -> bool:
    """Whether a folder holds the system, or is one of those that do."""
    parts = PurePosixPath(path).parts[1:]
    return not parts or parts[0] in _SYSTEM or (len(parts) == 1 and parts[0] in _TOP)
