"""The cluster's own network: a namespace with a bridge, and one cable from this machine into it.

The bridge lives in a network namespace of its own, so no firewall of this machine (Docker's FORWARD DROP
with br_netfilter, firewalld) ever sees traffic between nodes, and no rule, masquerade or ip_forward is
needed. This machine holds the first address of the subnet; nodes have no route out.

Nodes send this machine nothing but answers to what it asks them: what leaves their namespace by the cable is
sorted in there, by a qdisc that goes with it. That closes what this machine would forward, too.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Interface, IPv4Network
from itertools import chain
from pathlib import Path

from clusterctl.errors import MachineError, ProvisionError
from clusterctl.providers.local.layout import bridge_name, link_name, netns_name
from clusterctl.providers.local.system import TOOL_ENV, has_dnf, mounted_under, run

NETNS_DIR = Path("/run/netns")
_CANDIDATES = (IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))
_TRIES = 4096
_CABLE = "up0"  # its end in the cluster's network
_OPEN = "nodes reach services of this machine that listen on all addresses"


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
            ["ip", "link", "add", link, "type", "veth", "peer", "name", _CABLE, "netns", netns],
            what="laying the cable into the cluster's network",
        )
    run([*inside, "link", "set", _CABLE, "master", bridge, "up"], what="plugging the cable in")
    run(
        ["ip", "addr", "replace", f"{subnet[1]}/{subnet.prefixlen}", "dev", link], what="addressing the cable"
    )
    run(["ip", "link", "set", link, "up"], what="starting the cable")


def close(cluster_id: str, subnet: IPv4Network) -> tuple[str, ...]:
    """Let nothing but answers through the cable to this machine; says so where that can't be done."""
    if shutil.which("tc", path=TOOL_ENV["PATH"]) is None:
        return (f"{_OPEN}: there is no `tc`, of the package {'iproute-tc' if has_dnf() else 'iproute2'}",)
    tc, lines = ["tc", "-n", netns_name(cluster_id)], sorting(subnet)
    made = sum(line.startswith("filter ") for line in lines)
    if run([*tc, "filter", "show", "dev", _CABLE], what="reading filters").count("flowid 1:") == made:
        return ()
    remove_half_made = [*tc, "qdisc", "delete", "dev", _CABLE, "root"]
    with suppress(ProvisionError):  # there is none, as a rule
        run(remove_half_made, what="removing filters")
    try:
        run([*tc, "-batch", "-"], stdin="\n".join(lines) + "\n", what="sorting what nodes send here")
    except ProvisionError as exc:
        with suppress(ProvisionError):
            run(remove_half_made, what="removing filters")
        return (f"{_OPEN}: {exc.why}",)
    return ()


def sorting(subnet: IPv4Network) -> tuple[str, ...]:
    """The lines for ``tc -batch`` that sort what leaves the cluster's network by the cable.

    An answer goes HTB's direct way, 1:0; all else into the class whose qdisc drops it. No classifier's action
    is used, which some kernels lack. TCP is an answer with ACK or RST set: nothing connects by these.
    """
    # IPv4 without options, no fragment, from a node to this machine's address in the subnet.
    ours = (
        f"match u8 0x45 0xff at 0 match u16 0 0x3fff at 6 match ip src {subnet} match ip dst {subnet[1]}/32"
    )
    answers = [f"match ip protocol 6 0xff match u8 {bit} {bit} at 33" for bit in ("0x10", "0x04")]
    # Echo reply, destination unreachable, echo request, time exceeded; no redirect.
    answers += [f"match ip protocol 1 0xff match u8 {kind} 0xff at 20" for kind in (0, 3, 8, 11)]
    to = f"add dev {_CABLE} parent 1:"
    return (
        f"qdisc add dev {_CABLE} root handle 1: htb default 2",
        f"class {to} classid 1:2 htb rate 8bit quantum 1514",
        f"qdisc add dev {_CABLE} parent 1:2 handle 2: blackhole",
        f"filter {to} protocol arp pref 1 u32 match u32 0 0 flowid 1:0",
        *(f"filter {to} protocol ip pref 2 u32 {ours} {answer} flowid 1:0" for answer in answers),
    )


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
