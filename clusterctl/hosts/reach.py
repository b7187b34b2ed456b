"""What hosts reach of their network before they are a cluster: each other, repositories, an NFS server."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Interface, IPv4Network
from pathlib import PurePosixPath
from typing import Any, Final

from clusterctl.hosts.checks import Finding, RunAsRoot
from clusterctl.hosts.pairs import NFS_PORT, Peer, StartOnHost, examine_ports, needed_ports, not_looked_at
from clusterctl.hosts.probe import START, HostFacts
from clusterctl.hosts.roles import role_packages
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Host
from clusterctl.transport.base import remote_program
from clusterctl.util.process import on_each, parallel_map
from clusterctl.util.progress import NO_LIMIT, Limit

_PROGRAM: Final = remote_program("clusterctl.hosts.remote_reach").encode()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What hosts are to reach. ``new`` ones are no part of the cluster yet; ``offline``: from a bundle."""

    spec: ClusterSpec
    asked: Sequence[Host]
    new: Collection[str]
    network: IPv4Network | None
    offline: bool
    nfs: str | None = None  # the server that has the shared folder
    export: str = ""  # what it exports
    exports: bool = False  # whether the controller does
    folder: str | None = None  # that has to be there already


def examine(
    wanted: Wanted,
    facts: Mapping[str, HostFacts],
    root: RunAsRoot,
    start: StartOnHost,
    limit: Limit = NO_LIMIT,
) -> tuple[Finding, ...]:
    """Have every host that answered try; what it does not reach, and what is wrong between them."""
    hosts = {one.name: one for one in wanted.asked if one.name in facts}
    if not set(hosts) & set(wanted.new):
        return ()
    places = {name: _place(one, facts[name], wanted.network) for name, one in hosts.items()}

    def ask(name: str) -> tuple[Finding, ...]:
        request = _request(wanted, hosts[name], places, facts[name])
        said = json.loads(root(name, ("sh", "-c", START, "sh", json.dumps(request)), _PROGRAM))
        return (*_findings(wanted, name, said, places), *_exports(wanted, name, said["exports"], facts[name]))

    def ask_all() -> Iterator[Finding]:
        found, failed = on_each(hosts, ask, limit=limit)
        yield from (one for some in found.values() for one in some)
        yield from not_looked_at(failed)

    there = {name: place.address for name, place in places.items() if place}
    peers = {name: _peer(wanted, hosts[name], address, facts[name]) for name, address in there.items()}
    members = {one.name: one.address for one in wanted.asked} | there
    ask_ports = partial(examine_ports, peers, members, facts, start, limit)
    parts: tuple[Callable[[], Iterator[Finding]], ...] = (ask_all, ask_ports)
    found = dict.fromkeys(one for some in parallel_map(parts, lambda part: tuple(part())) for one in some)
    return (*_mtus(wanted, places), *found)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a host is on the cluster's network."""

    address: str
    interface: str
    mtu: int


def _place(host: Host, facts: HostFacts, network: IPv4Network | None) -> _Place | None:
    """None where it can't be told yet, or is the machine itself."""
    for name, addresses in facts.interfaces.items():
        for one in map(IPv4Interface, addresses):
            here = one.ip in network if network else str(one.ip) == host.address
            if here and not one.ip.is_loopback:
                return _Place(str(one.ip), name, facts.mtus.get(name, 0))
    return None


def _request(
    wanted: Wanted, host: Host, places: Mapping[str, _Place | None], facts: HostFacts
) -> Mapping[str, object]:
    leader = wanted.asked[0].name
    target, own = places.get(leader), places[host.name]
    pings = target is not None and own is not None and host.name != leader
    packages = role_packages(wanted.spec, host.roles, distribution_of(facts.system.release))
    new = host.name in wanted.new
    lacks = new and not set(packages) <= facts.packages
    return {
        "ping": target.address if target and pings else "",
        "mtu": own.mtu if own else 0,
        "nfs": wanted.nfs if new else None,
        "nfs_port": NFS_PORT,
        "folders": [wanted.folder] if wanted.folder and new else [],
        "repositories": lacks and not wanted.offline,
    }


def _peer(wanted: Wanted, host: Host, address: str, facts: HostFacts) -> Peer:
    """A host that the others try, unless its firewalld drops what `up` will let through."""
    ports = needed_ports(wanted.spec, host, exports=wanted.exports and host.name == wanted.asked[0].name)
    is_new, tried = host.name in wanted.new, facts.firewall.name != "firewalld"
    return Peer(address, ports, opens=is_new, tried=tried)


def _findings(
    wanted: Wanted,
    name: str,
    said: Mapping[str, Any],
    places: Mapping[str, _Place | None],
) -> Iterator[Finding]:
    own, leader = places[name], wanted.asked[0].name
    if said["narrow"] and own is not None:
        why = f"{own.interface} sends {own.mtu} bytes, and what is so large does not get to {leader} and back"
        fix = (
            f"`ip link set dev {own.interface} mtu 1500` on {name}, or let the switches pass {own.mtu} bytes"
        )
        yield Finding(name, "error", "mtu", "large packets are lost", why, fix)
    for url, why in said["repositories"].items():
        fix = (
            f"`sudo curl -sSI {url}` there must answer: open the firewall, or write the proxy into the "
            "package manager's configuration (sudo may drop one of the environment); or install from a file: "
            "`clusterctl bundle create`, `clusterctl up --bundle`"
        )
        what = "a package repository is out of reach"
        if not url:
            what = "there is no package repository"
            fix = (
                "write the distribution's into /etc/apt/sources.list.d there, so that `sudo apt-get update` "
                "reads one; or install from a file: `clusterctl bundle create`, `clusterctl up --bundle`"
            )
        yield Finding(name, "error", "repository", what, str(why), fix)
    if said["nfs"]:
        why = f"{wanted.nfs}, port {NFS_PORT}: {said['nfs']}"
        fix = (
            f"`showmount -e {wanted.nfs}` there must list the export: start the server, or open its firewall"
        )
        yield Finding(name, "error", "nfs", "the NFS server is out of reach", why, fix)
    for path in said["missing"]:
        why, fix = f"there is no {path}, and shared.kind is existing", f"mount it there: `mount {path}`"
        yield Finding(name, "error", "shared-folder", "the shared folder is missing", why, fix)


def _exports(
    wanted: Wanted, name: str, exports: Sequence[Sequence[str]] | None, facts: HostFacts
) -> Iterator[Finding]:
    """A folder that the NFS server does not export to the host, as far as its list tells.

    It may be below an export; names of clients only the server can resolve. NFS 4 may have a root of its own,
    below which paths are shorter: so this is a warning.
    """
    if exports is None:
        return
    above = {path: clients for path, *clients in exports if PurePosixPath(wanted.export).is_relative_to(path)}
    allowed = {client for clients in above.values() for client in clients}
    own = [one.ip for one in map(IPv4Interface, facts.addresses) if not one.ip.is_loopback]
    why = ""
    with suppress(ValueError):  # a name, or `*`
        networks = [IPv4Network(client, strict=False) for client in allowed]
        if not any(ip in network for ip in own for network in networks):
            why = f"{wanted.nfs} exports it to {', '.join(sorted(allowed))}, and not to this host"
    if not above:
        listed = ", ".join(path for path, *_ in exports) or "nothing"
        why = f"{wanted.nfs} exports {listed}, and not {wanted.export}"
    if why:
        fix = f"have {wanted.nfs} export {wanted.export} to {name}: /etc/exports there, then `exportfs -ra`"
        yield Finding(name, "warning", "nfs-export", "the folder is not exported to it", why, fix)


def _mtus(wanted: Wanted, places: Mapping[str, _Place | None]) -> Iterator[Finding]:
    leader = places.get(wanted.asked[0].name)
    for name, place in places.items():
        if (
            leader
            and place
            and name in wanted.new
            and place.mtu != leader.mtu
            and 0 not in (place.mtu, leader.mtu)
        ):
            why = f"{place.interface} has {place.mtu}, the controller's {leader.interface} {leader.mtu}"
            fix = f"`ip link set dev {place.interface} mtu {leader.mtu}`, and the same in its configuration"
            yield Finding(name, "warning", "mtu", "the hosts have different MTUs", why, fix)
