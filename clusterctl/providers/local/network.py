"""The cluster's own network: a namespace with a bridge, and one cable from this machine into it.

The bridge lives in a network namespace of its own, so no firewall of this machine (Docker's FORWARD DROP
with br_netfilter, firewalld) ever sees traffic between nodes, and no rule, masquerade or ip_forward is
needed. This machine holds the first address of the subnet; nodes have no route out.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Interface, IPv4Network
from itertools import chain
from pathlib import Path

from clusterctl.errors import MachineError, ProvisionError
from clusterctl.providers.local.layout import bridge_name, link_name, netns_name
from clusterctl.providers.local.mounts import mounted_under
from clusterctl.providers.local.run import run

NETNS_DIR = Path("/run/netns")
_CANDIDATES = (IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))
_TRIES = 4096


def used_networks() -> tuple[IPv4Network, ...]:
    """Every IPv4 network that this machine routes or holds an address in, but for default routes.

    VPNs split the default route in two (0.0.0.0/1 and 128.0.0.0/1): anything wider than /8 counts as default.
    """
    routes = json.loads(
        run(["ip", "-j", "-4", "route", "show", "table", "all"], what="reading routes") or "[]"
    )
    links = json.loads(run(["ip", "-j", "-4", "addr", "show"], what="reading addresses") or "[]")
    found = []
    for route in routes:
        destination = route.get("dst", "default")
        if destination != "default":
            found.append(IPv4Network(destination, strict=False))
    for link in links:
        for info in link.get("addr_info", ()):
            found.append(IPv4Interface(f"{info['local']}/{info['prefixlen']}").network)
    return tuple(network for network in found if network.prefixlen >= 8)  # noqa: PLR2004


def choose_subnet(
    cluster_id: str, used: Iterable[IPv4Network], wanted: IPv4Network | None = None
) -> IPv4Network:
    """A private /24 that nothing uses. The id decides where the search starts, so that clusters spread out.

    Raises:
        MachineError: the wanted subnet is in use, or none is free.
    """
    taken = tuple(used)
    if wanted is not None:
        if clash := next((network for network in taken if network.overlaps(wanted)), None):
            raise MachineError(
                f"subnet {wanted} is in use on this machine",
                where="provider.subnet",
                why=f"it overlaps {clash}",
                fix="choose another private /24, or leave provider.subnet out",
            )
        return wanted
    for candidate in _candidates(zlib.crc32(cluster_id.encode())):
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise MachineError(
        "no free subnet for the nodes",
        why="this machine's routes cover all private address ranges",
        fix="name a private /24 that may be used as provider.subnet",
    )


def _candidates(seed: int) -> Iterator[IPv4Network]:
    def spread(block: IPv4Network) -> Iterator[IPv4Network]:
        count = 2 ** (24 - block.prefixlen)
        base = int(block.network_address)
        for i in range(min(count, _TRIES)):
            yield IPv4Network((base + ((seed + i) % count << 8), 24))

    return chain.from_iterable(spread(block) for block in _CANDIDATES)


def create(cluster_id: str, subnet: IPv4Network) -> None:
    """Make the namespace, the bridge and the cable, or whatever of them is missing."""
    netns, link, bridge = netns_name(cluster_id), link_name(cluster_id), bridge_name(cluster_id)
    if not (NETNS_DIR / netns).exists():
        run(["ip", "netns", "add", netns], what="making the network namespace")
    inside = ["ip", "-n", netns]
    if not _has_link(bridge, inside):
        run([*inside, "link", "set", "lo", "up"], what="starting loopback")
        run(
            [*inside, "link", "add", bridge, "type", "bridge", "forward_delay", "0"], what="making the bridge"
        )
        run([*inside, "link", "set", bridge, "up"], what="starting the bridge")
    if not _has_link(link, ["ip"]):
        run(
            ["ip", "link", "add", link, "type", "veth", "peer", "name", "up0", "netns", netns],
            what="laying the cable into the cluster's network",
        )
    run([*inside, "link", "set", "up0", "master", bridge, "up"], what="plugging the cable in")
    run(
        ["ip", "addr", "replace", f"{subnet[1]}/{subnet.prefixlen}", "dev", link], what="addressing the cable"
    )
    run(["ip", "link", "set", link, "up"], what="starting the cable")


def remove(cluster_id: str) -> None:
    """Take the network away; the namespace takes its links along."""
    if _has_link(link_name(cluster_id), ["ip"]):
        run(["ip", "link", "delete", link_name(cluster_id)], what="removing the cable")
    if (NETNS_DIR / netns_name(cluster_id)).exists():
        run(["ip", "netns", "delete", netns_name(cluster_id)], what="removing the network namespace")


def remove_empty_folder() -> None:
    """`ip netns` mounts its folder at first use and leaves it; take it away once it is empty."""
    if not NETNS_DIR.is_dir() or any(NETNS_DIR.iterdir()):
        return
    with suppress(ProvisionError, OSError):  # somebody makes one right now, so it is theirs
        for point in mounted_under(NETNS_DIR):
            run(["umount", str(point)], what="unmounting the folder of network namespaces")
        NETNS_DIR.rmdir()


def links() -> tuple[str, ...]:
    """Names of this machine's links."""
    return tuple(path.name for path in Path("/sys/class/net").iterdir())


def _has_link(name: str, ip: list[str]) -> bool:
    shown = json.loads(run([*ip, "-j", "link", "show"], what="reading links") or "[]")
    return any(link.get("ifname") == name for link in shown)
