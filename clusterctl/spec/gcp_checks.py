"""What must hold between the fields of a spec for Google Cloud, without asking Google."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from pydantic import ValidationError

from clusterctl.spec import checks, gcp
from clusterctl.spec.base import PRIVATE_NETWORKS, Gpus
from clusterctl.spec.checks import Raw
from clusterctl.spec.gcp import ZONE, GcpNetwork, Machine
from clusterctl.spec.messages import Finding, Loc, did_you_mean, either, shown
from clusterctl.spec.units import GIB_MIB, format_duration, format_size

MAX_HOSTS: Final = 1000
OWN_LABELS: Final = "clusterctl-"
_LEAST_AUTO_DOWN_S: Final = 600
_LARGEST_PREFIX: Final = 29
_TAKEN_ADDRESSES: Final = 4  # of every subnetwork: the network, the gateway, one of Google's, the broadcast
_REGION: Final = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_KEY_LOCATION: Final = re.compile(r"/locations/([^/]+)/")
_DECIDED_ELSEWHERE: Final[Mapping[str, str]] = {
    "cpus": "machine_type",
    "memory": "machine_type",
    "disk": "boot_disk",
}


def findings(spec: Raw) -> Iterator[Finding]:
    """Every cross-field fault of a spec for Google Cloud given as plain values."""
    provider = checks.mapping(spec, "provider")
    yield from _partitions(spec)
    yield from _nodes(spec)
    yield from _place(provider)
    yield from _network(spec)
    yield from _storage(provider)
    yield from _rest(provider)


def _partitions(spec: Raw) -> Iterator[Finding]:
    names = []
    for index, partition in enumerate(checks.entries(spec, "partitions")):
        at = ("partitions", index)
        for key, decides in _DECIDED_ELSEWHERE.items():
            if partition.get(key) is not None:
                hint = f"remove it; {decides} under provider.partitions decides"
                yield Finding((*at, key), f"{key} is for local nodes", hint, at_key=True)
        name = checks.text(partition, "name")
        if name:
            names.append(name)
            if name.endswith("-"):
                message = f"{shown(name)} ends with a dash, which a name on Google Cloud can't"
                yield Finding((*at, "name"), message)
    for name in checks.mapping(spec, "provider", "partitions"):
        if name not in names:
            hint = did_you_mean(name, names) or f"the partitions are {', '.join(names) or 'missing'}"
            where = ("provider", "partitions", name)
            yield Finding(where, f"there is no partition {shown(name)}", hint, at_key=True)


def _nodes(spec: Raw) -> Iterator[Finding]:
    provider = checks.mapping(spec, "provider")
    driver_for = ""
    for index, partition in enumerate(checks.entries(spec, "partitions")):
        name = checks.text(partition, "name")
        if name is None:
            continue
        said = checks.mapping(provider, "partitions", name)
        where = ("provider", "partitions", name)
        nodes = Nodes(name, where, said, partition.get("gpus"), ("partitions", index, "gpus"))
        machine, found = _check(nodes)
        yield from found
        if machine and machine.gpu and not said.get("image"):
            driver_for = driver_for or name
    yield from _controller(provider)
    if checks.is_on(provider, "secure_boot") and driver_for:
        message = f"secure_boot keeps NVIDIA's driver of the default image from loading on {driver_for}"
        hint = f"remove it, or give {driver_for} an image whose driver is signed"
        yield Finding(("provider", "secure_boot"), message, hint)


def _controller(provider: Raw) -> Iterator[Finding]:
    where = ("provider", "controller")
    said = checks.mapping(provider, "controller")
    yield from _check(Nodes("the controller", where, said))[1]
    if checks.is_on(said, "spot"):
        message = "the controller can't be a spot node: the cluster would be gone with it"
        yield Finding((*where, "spot"), message, "remove spot")
    elif checks.is_on(said, "compact_placement"):
        message = "the controller is one machine: compact placement has no meaning"
        yield Finding((*where, "compact_placement"), message, "remove compact_placement")


def _place(provider: Raw) -> Iterator[Finding]:
    zone, region = checks.text(provider, "zone"), checks.text(provider, "region")
    if zone is None or re.search(ZONE, zone) is None:
        return
    right = zone.rpartition("-")[0]
    if region is not None and region != right:
        message = f"zone {zone} is in region {right}, not {shown(region)}"
        yield Finding(("provider", "region"), message, "remove region")
    location = _KEY_LOCATION.search(checks.text(provider, "kms_key") or "")
    if location and _REGION.fullmatch(location[1]) and location[1] != right:
        message = f"the key is in {location[1]}, but disks of zone {zone} need one in {right}"
        yield Finding(("provider", "kms_key"), message, f"name a key in {right}")


def _network(spec: Raw) -> Iterator[Finding]:
    network = checks.mapping(spec, "provider", "network")
    hosts = 1 + checks.node_count(spec)
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
    default = GcpNetwork().cidr
    try:
        cidr = IPv4Network(checks.text(network, "cidr") or default)
    except ValueError:
        return
    if given and cidr != default:
        yield Finding((*at, "cidr"), "an existing subnetwork has its own addresses", "remove cidr")
    elif not given:
        yield from _addresses(cidr, hosts)


def _addresses(cidr: IPv4Network, hosts: int) -> Iterator[Finding]:
    at, room = ("provider", "network", "cidr"), cidr.num_addresses - _TAKEN_ADDRESSES
    if not any(cidr.subnet_of(private) for private in PRIVATE_NETWORKS):
        yield Finding(at, f"{cidr} is not private, such as 10.80.0.0/20")
    elif cidr.prefixlen > _LARGEST_PREFIX:
        yield Finding(
            at, f"{cidr} is smaller than a subnetwork can be", f"take a /{_LARGEST_PREFIX} or larger"
        )
    elif room < hosts:
        yield Finding(at, f"{cidr} has room for {room} hosts, not for {hosts}", "take a larger network")


def _storage(provider: Raw) -> Iterator[Finding]:
    for holder, key in (("bucket", "name"), ("state", "bucket")):
        name = checks.text(checks.mapping(provider, holder), key)
        if name is not None and ("google" in name or name.startswith("goog")):
            message = f"{shown(name)} is no bucket of yours: such names begin with goog or hold google"
            yield Finding(("provider", holder, key), message, "take another name")
    filestore = provider.get("filestore")
    if not isinstance(filestore, Mapping):
        return
    tier = filestore.get("tier", "BASIC_HDD")
    limits = gcp.data()["filestore"].get(tier) if isinstance(tier, str) else None
    size_mib = checks.size_mib({"capacity": "1TiB", **filestore}, "capacity")
    if limits is None or size_mib is None:
        return
    least, most, step = (limits[key] * GIB_MIB for key in ("least", "most", "step"))
    if least <= size_mib <= most and size_mib % step == 0:
        return
    message = f"{tier} has {format_size(least)} to {format_size(most)}, not {format_size(size_mib)}"
    hint = f"write {format_size(least)} or more" if size_mib < least else f"by steps of {format_size(step)}"
    yield Finding(("provider", "filestore", "capacity"), message, hint)


def _rest(provider: Raw) -> Iterator[Finding]:
    for key in checks.mapping(provider, "labels"):
        if key.startswith(OWN_LABELS):
            message = f"labels that start with {OWN_LABELS} are clusterctl's own"
            yield Finding(("provider", "labels", key), message, "take another key", at_key=True)
    for name in checks.mapping(provider, "prices"):
        if gcp.machine(name) is None:
            at, hint = ("provider", "prices", name), did_you_mean(name, gcp.machines())
            yield Finding(at, f"there is no machine type {shown(name)}", hint, at_key=True)
    after_s = checks.duration_s(provider, "auto_down")
    if after_s is not None and after_s < _LEAST_AUTO_DOWN_S:
        least = format_duration(_LEAST_AUTO_DOWN_S)
        message = f"auto_down must be at least {least}: a cluster is idle between two jobs, too"
        yield Finding(("provider", "auto_down"), message, f"write {least} or more")


_LEAST_DISK_MIB: Final = 10 * GIB_MIB
_LEAST_BOOT_MIB: Final = 20 * GIB_MIB  # what the default image needs
_LEAST_BOOT_WITH_GPU_MIB: Final = 50 * GIB_MIB  # and the one with NVIDIA's driver
_MOST_DISK_MIB: Final = 64 * 1024 * GIB_MIB


@dataclass(frozen=True, slots=True)
class Nodes:
    """What is said of some nodes: under ``where`` in the provider, and which GPUs, at ``gpus_at``."""

    name: str
    where: Loc
    said: Raw
    gpus: object = None
    gpus_at: Loc = ()

    @property
    def machine_at(self) -> Loc:
        """What decides on the machine type."""
        return (*self.where, "machine_type") if self.said.get("machine_type") else (*self.gpus_at, "type")


def _check(nodes: Nodes) -> tuple[Machine | None, list[Finding]]:
    """The machine type that these nodes get, where it can be told, and every fault of theirs."""
    found, machine = [*_of_any_machine(nodes)], _resolved(nodes)
    if isinstance(machine, Finding):
        return None, [machine, *found]
    if machine is not None:
        found += _of_this_machine(nodes, machine)
    return machine, found


def _resolved(nodes: Nodes) -> Machine | Finding | None:
    """The machine type, or why there is none; None where that is reported by a field itself."""
    try:
        wanted = None if nodes.gpus is None else Gpus.model_validate(nodes.gpus)
    except ValidationError:
        return None
    if wanted is not None:
        known = gcp.gpu_type(wanted.type)
        if known is None:
            names = tuple(gcp.data()["gpus"])
            hint = did_you_mean(wanted.type, names) or f"it has {', '.join(names)}"
            return Finding((*nodes.gpus_at, "type"), f"Google Cloud has no GPU {shown(wanted.type)}", hint)
        wanted = Gpus(type=known, count=wanted.count)
        if wanted.count not in gcp.counts(known):
            hint = f"write count: {either(gcp.counts(known))}"
            return Finding((*nodes.gpus_at, "count"), f"a node can't have {wanted}", hint)
    name = nodes.said.get("machine_type")
    if name is None:
        return gcp.default_machine(wanted)
    return _named(nodes, name, wanted) if isinstance(name, str) else None


def _named(nodes: Nodes, name: str, wanted: Gpus | None) -> Machine | Finding:
    named = gcp.machine(name)
    if named is None:
        hint = did_you_mean(name, gcp.machines()) or f"families: {', '.join(gcp.data()['families'])}"
        return Finding((*nodes.where, "machine_type"), f"there is no machine type {shown(name)}", hint)
    if wanted is None or named.gpu == wanted:
        return named
    return _with_added(nodes, named, wanted)


def _with_added(nodes: Nodes, named: Machine, wanted: Gpus) -> Machine | Finding:
    """The machine type with GPUs that it does not have by itself."""
    at, better = (*nodes.where, "machine_type"), gcp.default_machine(wanted).name
    if named.gpu is not None:
        message = f"{named.name} has {named.gpu}, not the {wanted} that {nodes.name} asks for"
        return Finding(at, message, f"{wanted} is what {better} has")
    limit = gcp.most_vcpus(wanted)
    if limit is None or named.family != "n1":
        return Finding(at, f"{named.name} can't have {wanted}", f"{better} has it")
    if named.vcpus > limit:
        message = (
            f"{named.name} has {named.vcpus} processors, but beside {wanted} there may be at most {limit}"
        )
        return Finding(at, message, "take a smaller machine type, or more GPUs")
    return gcp.with_added(named, wanted)


def _of_any_machine(nodes: Nodes) -> Iterator[Finding]:
    said = nodes.said
    spot = checks.is_on(said, "spot")
    if spot and said.get("reservation"):
        message = "a spot node can't be taken from a reservation"
        yield Finding((*nodes.where, "reservation"), message, "remove reservation, or spot: true")
    if spot and checks.is_on(said, "compact_placement"):
        message = "spot nodes can't have compact placement: a preempted one may restart elsewhere"
        yield Finding((*nodes.where, "compact_placement"), message, "remove compact_placement, or spot: true")
    if said.get("termination_action") == "DELETE" and not said.get("spot"):
        at = (*nodes.where, "termination_action")
        yield Finding(at, "termination_action is for spot nodes only", "remove it, or write spot: true")
    if checks.is_on(said, "tier_1") and not checks.is_on(said, "gvnic", default=True):
        yield Finding((*nodes.where, "gvnic"), "tier_1 needs gvnic", "remove gvnic: false, or tier_1")
    image = said.get("image")
    if isinstance(image, Mapping) and bool(image.get("family")) == bool(image.get("name")):
        message = "an image has a family or a name, one of the two"
        hint = "keep one of them" if image.get("family") else "write family: NAME or name: NAME"
        yield Finding((*nodes.where, "image"), message, hint, at_key=True)
    for at, disk in _disks(nodes):
        yield from _disk_size(at, checks.size_mib(disk, "size"))


def _disks(nodes: Nodes) -> Iterator[tuple[Loc, Raw]]:
    yield (*nodes.where, "boot_disk"), checks.mapping(nodes.said, "boot_disk")
    for index, disk in enumerate(checks.entries(nodes.said, "extra_disks")):
        yield (*nodes.where, "extra_disks", index), disk


def _disk_size(at: Loc, size_mib: int | None) -> Iterator[Finding]:
    if size_mib is None:
        return
    if size_mib % GIB_MIB:
        message = f"a disk has whole GiB, not {format_size(size_mib)}"
        yield Finding((*at, "size"), message, f"write {size_mib // GIB_MIB + 1}GiB")
    elif not _LEAST_DISK_MIB <= size_mib <= _MOST_DISK_MIB:
        least, most = format_size(_LEAST_DISK_MIB), format_size(_MOST_DISK_MIB)
        yield Finding((*at, "size"), f"a disk has {least} to {most}, not {format_size(size_mib)}")


def _of_this_machine(nodes: Nodes, machine: Machine) -> Iterator[Finding]:
    said, name, where = nodes.said, machine.name, nodes.where
    if machine.only and not any(said.get(way) for way in machine.only):
        ways = {"spot": "write spot: true", "reservation": "name a reservation"}
        hint = ", or ".join(ways[way] for way in machine.only)
        yield Finding(nodes.machine_at, f"{name} is not available on demand", hint)
    if checks.is_on(said, "compact_placement") and not machine.compact_placement:
        near = (family for family, facts in gcp.data()["families"].items() if "compact_placement" in facts)
        message = f"nodes of {name} can't have compact placement"
        hint = f"take a machine type of {either(near)}"
        yield Finding((*where, "compact_placement"), message, hint)
    if checks.is_on(said, "tier_1") and not machine.tier_1:
        yield Finding((*where, "tier_1"), f"{name} has no TIER_1 networking", _tier_1_hint(machine))
    if machine.gvnic_only and not checks.is_on(said, "gvnic", default=True):
        yield Finding((*where, "gvnic"), f"{name} has only Google's network interface", "remove gvnic: false")
    yield from _local_ssds(nodes, machine)
    yield from _disks_of(nodes, machine)


def _tier_1_hint(machine: Machine) -> str:
    from_vcpus = {
        f: facts["tier_1_from"] for f, facts in gcp.data()["families"].items() if "tier_1_from" in facts
    }
    if machine.family in from_vcpus:
        return f"{machine.family} has it from {from_vcpus[machine.family]} processors on"
    return f"take a large machine type of {either(from_vcpus)}"


def _local_ssds(nodes: Nodes, machine: Machine) -> Iterator[Finding]:
    asked, at = checks.whole(nodes.said, "local_ssds") or 0, (*nodes.where, "local_ssds")
    if asked <= 0 or asked in machine.local_ssds:
        return
    if machine.bundled_ssds:
        message = f"{machine.name} has its {machine.bundled_ssds} local disks already"
        yield Finding(at, message, "remove local_ssds")
    elif not machine.local_ssds:
        yield Finding(at, f"{machine.name} can't have local disks", "remove local_ssds")
    else:
        message = f"{machine.name} can't have {asked} local disks"
        yield Finding(at, message, f"it takes {either(machine.local_ssds)}, or none")


def _disks_of(nodes: Nodes, machine: Machine) -> Iterator[Finding]:
    for at, disk in _disks(nodes):
        allowed = machine.boot_disks if at[-1] == "boot_disk" else machine.extra_disks
        kind = checks.text(disk, "type")
        if kind is not None and kind not in allowed:
            what = "start from" if at[-1] == "boot_disk" else "have"
            message = f"{machine.name} can't {what} a disk of {shown(kind)}"
            yield Finding((*at, "type"), message, f"write {either(allowed)}, or nothing")
    size_mib = checks.size_mib(checks.mapping(nodes.said, "boot_disk"), "size")
    if size_mib is None or nodes.said.get("image") or size_mib < _LEAST_DISK_MIB or size_mib % GIB_MIB:
        return
    least = _LEAST_BOOT_WITH_GPU_MIB if machine.gpu else _LEAST_BOOT_MIB
    if size_mib < least:
        image = "the default image with NVIDIA's driver" if machine.gpu else "the default image"
        message = f"{image} needs {format_size(least)}, not {format_size(size_mib)}"
        yield Finding((*nodes.where, "boot_disk", "size"), message, f"write {format_size(least)} or more")
