"""What hosts reach of their network before they are a cluster: each other, repositories, an NFS server."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Interface, IPv4Network
from typing import Any, Final

from clusterctl.hosts.checks import Finding, RunAsRoot
from clusterctl.hosts.pairs import NFS_PORT, Peer, StartOnHost, examine_ports, needed_ports, not_looked_at
from clusterctl.hosts.probe import START, HostFacts
from clusterctl.hosts.roles import role_packages
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.onprem import OnpremShared
from clusterctl.state.inventory import Host
from clusterctl.transport.base import remote_program
from clusterctl.util.process import on_each, parallel_map
from clusterctl.util.progress import NO_LIMIT, Limit

_PROGRAM: Final = remote_program("clusterctl.hosts.remote_reach").encode()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What hosts are to reach. ``new`` ones are no part of the cluster yet; ``offline``: from a bundle."""

    spec: ClusterSpec
    shared: OnpremShared
    asked: Sequence[Host]
    new: Collection[str]
    offline: bool


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
    network = wanted.spec.provider.known_network

    def ask(name: str) -> tuple[Finding, ...]:
        request = _request(wanted, hosts[name], facts[name])
        said = json.loads(root(name, ("sh", "-c", START, "sh", json.dumps(request)), _PROGRAM))
        return tuple(_findings(wanted, name, said))

    def ask_all() -> Iterator[Finding]:
        found, failed = on_each(hosts, ask, limit=limit)
        yield from (one for some in found.values() for one in some)
        yield from not_looked_at(failed)

    places = {name: _address(one, facts[name], network) for name, one in hosts.items()}
    there = {name: address for name, address in places.items() if address}
    peers = {name: _peer(wanted, hosts[name], address, facts[name]) for name, address in there.items()}
    members = {one.name: one.address for one in wanted.asked} | there
    ask_ports = partial(examine_ports, peers, members, facts, start, limit)
    parts: tuple[Callable[[], Iterator[Finding]], ...] = (ask_all, ask_ports)
    found = (one for some in parallel_map(parts, lambda part: tuple(part())) for one in some)
    return tuple(dict.fromkeys(found))


def _address(host: Host, facts: HostFacts, network: IPv4Network | None) -> str:
    """The address of a host on the cluster's network; "" if it can't be told yet, or there is no network."""
    own = [one.ip for one in map(IPv4Interface, facts.addresses) if not one.ip.is_loopback]
    return next((str(ip) for ip in own if (ip in network if network else str(ip) == host.address)), "")


def _request(wanted: Wanted, host: Host, facts: HostFacts) -> Mapping[str, object]:
    packages = role_packages(wanted.spec, host.roles, distribution_of(facts.system.release))
    new = host.name in wanted.new
    lacks = new and not set(packages) <= facts.packages
    return {
        "nfs": wanted.shared.server if new else None,
        "nfs_port": NFS_PORT,
        "folders": [wanted.shared.path] if wanted.shared.kind == "existing" and new else [],
        "repositories": lacks and not wanted.offline,
    }


def _peer(wanted: Wanted, host: Host, address: str, facts: HostFacts) -> Peer:
    """A host that the others try, unless its firewalld drops what `up` will let through."""
    exports = wanted.shared.kind == "nfs" and wanted.shared.server is None
    ports = needed_ports(wanted.spec, host, exports=exports and host.name == wanted.asked[0].name)
    is_new, tried = host.name in wanted.new, facts.firewall.name != "firewalld"
    return Peer(address, ports, opens=is_new, tried=tried)


def _findings(wanted: Wanted, name: str, said: Mapping[str, Any]) -> Iterator[Finding]:
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
        server = wanted.shared.server
        why = f"{server}, port {NFS_PORT}: {said['nfs']}"
        fix = f"`showmount -e {server}` there must list the export: start the server, or open its firewall"
        yield Finding(name, "error", "nfs", "the NFS server is out of reach", why, fix)
    for path in said["missing"]:
        why, fix = f"there is no {path}, and shared.kind is existing", f"mount it there: `mount {path}`"
        yield Finding(name, "error", "shared-folder", "the shared folder is missing", why, fix)
