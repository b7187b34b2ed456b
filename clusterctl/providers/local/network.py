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
from clusterctl.providers.local.layout import bridge_name, netns_name
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
    routes = json.loads(_ip("-j", "-4", "route", "show", "table", "all", what="reading routes") or "[]")
    links = json.loads(_ip("-j", "-4", "addr", "show", what="reading addresses") or "[]")
    destinations = [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    addresses = [info for link in links for info in link.get("addr_info", ())]
    found = [IPv4Network(destination, strict=False) for destination in destinations]
    found += [IPv4Interface(f"{info['local']}/{info['prefixlen']}").network for info in addresses]
    return tuple(network for network in found if network.prefixlen >= 8)  # noqa: PLR2004


def choose_subnet(
    cluster_id: str, used: Iterable[IPv4Network], wanted: IPv4Network | None = None
) -> IPv4Network:
    """A private /24 that nothing uses. The id decides where the search starts: clusters spread out."""
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
    netns, bridge = netns_name(cluster_id), bridge_name(cluster_id)
    link, inside = netns, ("-n", netns)
    if not (NETNS_DIR / netns).exists():
        _ip("netns", "add", netns, what="making the network namespace")
    if not _has_link(bridge, *inside):
        _ip(*inside, *"link set lo up".split(), what="starting loopback")
        _ip(*inside, *f"link add {bridge} type bridge forward_delay 0".split(), what="making the bridge")
        _ip(*inside, *f"link set {bridge} up".split(), what="starting the bridge")
    if not _has_link(link):
        cable = f"link add {link} type veth peer name {_CABLE} netns {netns}"
        _ip(*cable.split(), what="laying the cable into the cluster's network")
    _ip(*inside, *f"link set {_CABLE} master {bridge} up".split(), what="plugging the cable in")
    _ip(*f"addr replace {subnet[1]}/{subnet.prefixlen} dev {link}".split(), what="addressing the cable")
    _ip("link", "set", link, "up", what="starting the cable")


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
    name = netns_name(cluster_id)
    if _has_link(name):
        _ip("link", "delete", name, what="removing the cable")
    if (NETNS_DIR / name).exists():
        _ip("netns", "delete", name, what="removing the network namespace")


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


def _has_link(name: str, *inside: str) -> bool:
    shown = json.loads(_ip(*inside, "-j", "link", "show", what="reading links") or "[]")
    return any(link.get("ifname") == name for link in shown)


def _ip(*words: str, what: str) -> str:
    return run(["ip", *words], what=what)
