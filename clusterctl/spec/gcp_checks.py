"""What must hold between the fields of a spec for Google Cloud, without asking Google."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network
from typing import Final

from clusterctl.spec import machines, node_checks, plain
from clusterctl.spec.finding import Finding
from clusterctl.spec.gcp import ZONE, GcpNetwork
from clusterctl.spec.node_checks import Nodes
from clusterctl.spec.plain import Plain
from clusterctl.spec.units import GIB_MIB, format_duration, format_size
from clusterctl.spec.words import did_you_mean, shown

MAX_HOSTS: Final = 1000
OWN_LABELS: Final = "clusterctl-"
_LEAST_AUTO_DOWN_S: Final = 600
_LARGEST_PREFIX: Final = 29
_TAKEN_ADDRESSES: Final = 4  # of every subnetwork: the network, the gateway, one of Google's, the broadcast
_PRIVATE: Final = tuple(IPv4Network(n) for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
_REGION: Final = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_KEY_LOCATION: Final = re.compile(r"/locations/([^/]+)/")
_DECIDED_ELSEWHERE: Final[Mapping[str, str]] = {
    "cpus": "remove it; machine_type under provider.partitions decides",
    "memory": "remove it; machine_type under provider.partitions decides",
    "disk": "remove it; boot_disk under provider.partitions decides",
}


def findings(spec: Plain) -> Iterator[Finding]:
    """Every cross-field fault of a spec for Google Cloud given as plain values."""
    provider = plain.mapping(spec, "provider")
    yield from _partitions(spec)
    yield from _partition_names(spec)
    yield from _nodes(spec)
    yield from _place(provider)
    yield from _network(spec)
    yield from _storage(provider)
    yield from _rest(provider)


def _partitions(spec: Plain) -> Iterator[Finding]:
    for index, partition in enumerate(plain.entries(spec, "partitions")):
        at = ("partitions", index)
        for key, hint in _DECIDED_ELSEWHERE.items():
            if partition.get(key) is not None:
                yield Finding((*at, key), f"{key} is for local nodes", hint, at_key=True)
        name = plain.text(partition, "name")
        if name is not None and name.endswith("-"):
            message = f"{shown(name)} ends with a dash, which a name on Google Cloud can't"
            yield Finding((*at, "name"), message)


def _partition_names(spec: Plain) -> Iterator[Finding]:
    names = [name for p in plain.entries(spec, "partitions") if (name := plain.text(p, "name"))]
    for name in plain.mapping(spec, "provider", "partitions"):
        if name not in names:
            hint = did_you_mean(name, names) or f"the partitions are {', '.join(names) or 'missing'}"
            at = ("provider", "partitions", name)
            yield Finding(at, f"there is no partition {shown(name)}", hint, at_key=True)


def _nodes(spec: Plain) -> Iterator[Finding]:
    provider = plain.mapping(spec, "provider")
    driver_for = ""
    for index, partition in enumerate(plain.entries(spec, "partitions")):
        name = plain.text(partition, "name")
        if name is None:
            continue
        said = plain.mapping(provider, "partitions", name)
        where = ("provider", "partitions", name)
        nodes = Nodes(name, where, said, partition.get("gpus"), ("partitions", index, "gpus"))
        checked = node_checks.check(nodes)
        yield from checked.findings
        if checked.machine and checked.machine.gpu and not said.get("image"):
            driver_for = driver_for or name
    yield from _controller(provider)
    if plain.is_on(provider, "secure_boot") and driver_for:
        message = f"secure_boot keeps NVIDIA's driver of the default image from loading on {driver_for}"
        hint = f"remove it, or give {driver_for} an image whose driver is signed"
        yield Finding(("provider", "secure_boot"), message, hint)


def _controller(provider: Plain) -> Iterator[Finding]:
    where = ("provider", "controller")
    said = plain.mapping(provider, "controller")
    yield from node_checks.check(Nodes("the controller", where, said)).findings
    if plain.is_on(said, "spot"):
        message = "the controller can't be a spot node: the cluster would be gone with it"
        yield Finding((*where, "spot"), message, "remove spot")
    elif plain.is_on(said, "compact_placement"):
        message = "the controller is one machine, close to nothing"
        yield Finding((*where, "compact_placement"), message, "remove compact_placement")


def _place(provider: Plain) -> Iterator[Finding]:
    zone, region = plain.text(provider, "zone"), plain.text(provider, "region")
    if zone is None or re.search(ZONE, zone) is None:
        return
    right = zone.rpartition("-")[0]
    if region is not None and region != right:
        message = f"zone {zone} is in region {right}, not {shown(region)}"
        yield Finding(("provider", "region"), message, "remove region")
    location = _KEY_LOCATION.search(plain.text(provider, "kms_key") or "")
    if location and _REGION.fullmatch(location[1]) and location[1] != right:
        message = f"the key is in {location[1]}, but disks of zone {zone} need one in {right}"
        yield Finding(("provider", "kms_key"), message, f"name a key in {right}")


def _network(spec: Plain) -> Iterator[Finding]:
    network = plain.mapping(spec, "provider", "network")
    hosts = 1 + sum(max(plain.whole(p, "nodes") or 0, 0) for p in plain.entries(spec, "partitions"))
    if hosts > MAX_HOSTS:
        message = f"these nodes and the controller are more than {MAX_HOSTS} hosts"
        yield Finding(("partitions",), message, f"ask for at most {MAX_HOSTS - 1} nodes", at_key=True)
        return
    names = {key: network.get(key) for key in ("network", "subnetwork")}
    given = [key for key, name in names.items() if name is not None]
    at = ("provider", "network")
    if len(given) == 1:
        (other,) = names.keys() - set(given)
        yield Finding((*at, given[0]), f"{given[0]} needs {other} beside it", f"name the {other} too")
        return
    default = str(GcpNetwork().cidr)
    cidr = _cidr(plain.text(network, "cidr") or default)
    if cidr is None:
        return
    if given and str(cidr) != default:
        yield Finding((*at, "cidr"), "an existing subnetwork has its own addresses", "remove cidr")
    elif not given:
        yield from _addresses(cidr, hosts)


def _addresses(cidr: IPv4Network, hosts: int) -> Iterator[Finding]:
    at, room = ("provider", "network", "cidr"), cidr.num_addresses - _TAKEN_ADDRESSES
    if not any(cidr.subnet_of(private) for private in _PRIVATE):
        yield Finding(at, f"{cidr} is not private, such as 10.80.0.0/20")
    elif cidr.prefixlen > _LARGEST_PREFIX:
        yield Finding(
            at, f"{cidr} is smaller than a subnetwork can be", f"take a /{_LARGEST_PREFIX} or larger"
        )
    elif room < hosts:
        yield Finding(at, f"{cidr} has room for {room} hosts, not for {hosts}", "take a larger network")


def _cidr(text: str) -> IPv4Network | None:
    try:
        return IPv4Network(text)
    except ValueError:
        return None


def _storage(provider: Plain) -> Iterator[Finding]:
    for holder, key in (("bucket", "name"), ("state", "bucket")):
        name = plain.text(plain.mapping(provider, holder), key)
        if name is not None and ("google" in name or name.startswith("goog")):
            message = f"{shown(name)} is no bucket of yours: such names begin with goog or hold google"
            yield Finding(("provider", holder, key), message, "take another name")
    filestore = provider.get("filestore")
    if not isinstance(filestore, Mapping):
        return
    tier = filestore.get("tier", "BASIC_HDD")
    limits = machines.data()["filestore"].get(tier) if isinstance(tier, str) else None
    size_mib = plain.size_mib({"capacity": "1TiB", **filestore}, "capacity")
    if limits is None or size_mib is None:
        return
    least, most, step = (limits[key] * GIB_MIB for key in ("least", "most", "step"))
    if least <= size_mib <= most and size_mib % step == 0:
        return
    message = f"{tier} has {format_size(least)} to {format_size(most)}, not {format_size(size_mib)}"
    hint = f"write {format_size(least)} or more" if size_mib < least else f"by steps of {format_size(step)}"
    yield Finding(("provider", "filestore", "capacity"), message, hint)


def _rest(provider: Plain) -> Iterator[Finding]:
    for key in plain.mapping(provider, "labels"):
        if key.startswith(OWN_LABELS):
            message = f"labels that start with {OWN_LABELS} are clusterctl's own"
            yield Finding(("provider", "labels", key), message, "take another key", at_key=True)
    for name in plain.mapping(provider, "prices"):
        if machines.machine(name) is None:
            at, hint = ("provider", "prices", name), did_you_mean(name, machines.machines())
            yield Finding(at, f"there is no machine type {shown(name)}", hint, at_key=True)
    after_s = plain.duration_s(provider, "auto_down")
    if after_s is not None and after_s < _LEAST_AUTO_DOWN_S:
        least = format_duration(_LEAST_AUTO_DOWN_S)
        message = f"auto_down must be at least {least}: a cluster is idle between two jobs, too"
        yield Finding(("provider", "auto_down"), message, f"write {least} or more")
