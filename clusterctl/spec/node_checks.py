"""What must hold within the nodes of one partition on Google Cloud, or its controller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from clusterctl.spec import machines, plain
from clusterctl.spec.finding import Finding, Loc
from clusterctl.spec.gpus import Gpus
from clusterctl.spec.machines import Machine
from clusterctl.spec.plain import Plain
from clusterctl.spec.units import GIB_MIB, format_size
from clusterctl.spec.words import did_you_mean, either, shown

_LEAST_DISK_MIB: Final = 10 * GIB_MIB
_LEAST_BOOT_MIB: Final = 20 * GIB_MIB  # what the default image needs
_LEAST_BOOT_WITH_GPU_MIB: Final = 50 * GIB_MIB  # and the one with NVIDIA's driver
_MOST_DISK_MIB: Final = 64 * 1024 * GIB_MIB


@dataclass(frozen=True, slots=True)
class Nodes:
    """What is said of some nodes: under ``where`` in the provider, and which GPUs, at ``gpus_at``."""

    name: str
    where: Loc
    said: Plain
    gpus: object = None
    gpus_at: Loc = ()

    @property
    def machine_at(self) -> Loc:
        """What decides on the machine type."""
        return (*self.where, "machine_type") if self.said.get("machine_type") else (*self.gpus_at, "type")


@dataclass(frozen=True, slots=True)
class Checked:
    """The machine type of some nodes, where it can be told, and what is wrong with them."""

    machine: Machine | None
    findings: tuple[Finding, ...]


def check(nodes: Nodes) -> Checked:
    """The machine type that these nodes get, and every fault of theirs."""
    found = [*_of_any_machine(nodes)]
    machine = _resolved(nodes)
    if isinstance(machine, Finding):
        return Checked(None, (machine, *found))
    if machine is not None:
        found += _of_this_machine(nodes, machine)
    return Checked(machine, tuple(found))


def _resolved(nodes: Nodes) -> Machine | Finding | None:
    """The machine type, or why there is none; None where that is reported by a field itself."""
    try:
        wanted = None if nodes.gpus is None else Gpus.model_validate(nodes.gpus)
    except ValidationError:
        return None
    if wanted is not None:
        known = machines.gpu_type(wanted.type)
        if known is None:
            names = tuple(machines.data()["gpus"])
            hint = did_you_mean(wanted.type, names) or f"it has {', '.join(names)}"
            return Finding((*nodes.gpus_at, "type"), f"Google Cloud has no GPU {shown(wanted.type)}", hint)
        wanted = Gpus(type=known, count=wanted.count)
        if wanted.count not in machines.counts(known):
            hint = f"write count: {either(machines.counts(known))}"
            return Finding((*nodes.gpus_at, "count"), f"a node can't have {wanted}", hint)
    name = nodes.said.get("machine_type")
    if name is None:
        return machines.default_machine(wanted)
    return _named(nodes, name, wanted) if isinstance(name, str) else None


def _named(nodes: Nodes, name: str, wanted: Gpus | None) -> Machine | Finding:
    named = machines.machine(name)
    if named is None:
        hint = (
            did_you_mean(name, machines.machines()) or f"families: {', '.join(machines.data()['families'])}"
        )
        return Finding((*nodes.where, "machine_type"), f"there is no machine type {shown(name)}", hint)
    if wanted is None or named.gpu == wanted:
        return named
    return _with_added(nodes, named, wanted)


def _with_added(nodes: Nodes, named: Machine, wanted: Gpus) -> Machine | Finding:
    """The machine type with GPUs that it does not have by itself."""
    at, better = (*nodes.where, "machine_type"), machines.default_machine(wanted).name
    if named.gpu is not None:
        message = f"{named.name} has {named.gpu}, not the {wanted} that {nodes.name} asks for"
        return Finding(at, message, f"{wanted} is what {better} has")
    limit = machines.most_vcpus(wanted)
    if limit is None or named.family != "n1":
        return Finding(at, f"{named.name} can't have {wanted}", f"{better} has it")
    if named.vcpus > limit:
        message = (
            f"{named.name} has {named.vcpus} processors, but beside {wanted} there may be at most {limit}"
        )
        return Finding(at, message, "take a smaller machine type, or more GPUs")
    return machines.with_added(named, wanted)


def _of_any_machine(nodes: Nodes) -> Iterator[Finding]:
    said = nodes.said
    spot = plain.is_on(said, "spot")
    if spot and said.get("reservation"):
        message = "a spot node can't be taken from a reservation"
        yield Finding((*nodes.where, "reservation"), message, "remove reservation, or spot: true")
    if spot and plain.is_on(said, "compact_placement"):
        message = "spot nodes can't be kept close to each other: one that is taken away comes back elsewhere"
        yield Finding((*nodes.where, "compact_placement"), message, "remove compact_placement, or spot: true")
    if said.get("termination_action") == "DELETE" and not said.get("spot"):
        at = (*nodes.where, "termination_action")
        yield Finding(at, "termination_action is for spot nodes only", "remove it, or write spot: true")
    if plain.is_on(said, "tier_1") and not plain.is_on(said, "gvnic", default=True):
        yield Finding((*nodes.where, "gvnic"), "tier_1 needs gvnic", "remove gvnic: false, or tier_1")
    image = said.get("image")
    if isinstance(image, Mapping) and bool(image.get("family")) == bool(image.get("name")):
        message = "an image has a family or a name, one of the two"
        hint = "keep one of them" if image.get("family") else "write family: NAME or name: NAME"
        yield Finding((*nodes.where, "image"), message, hint, at_key=True)
    for at, disk in _disks(nodes):
        yield from _disk_size(at, plain.size_mib(disk, "size"))


def _disks(nodes: Nodes) -> Iterator[tuple[Loc, Plain]]:
    yield (*nodes.where, "boot_disk"), plain.mapping(nodes.said, "boot_disk")
    for index, disk in enumerate(plain.entries(nodes.said, "extra_disks")):
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
        yield Finding(nodes.machine_at, f"{name} is not to be had on demand", hint)
    if plain.is_on(said, "compact_placement") and not machine.compact_placement:
        near = (
            family for family, facts in machines.data()["families"].items() if "compact_placement" in facts
        )
        message = f"nodes of {name} can't be placed close to each other"
        hint = f"take a machine type of {either(near)}"
        yield Finding((*where, "compact_placement"), message, hint)
    if plain.is_on(said, "tier_1") and not machine.tier_1:
        yield Finding((*where, "tier_1"), f"{name} has no TIER_1 networking", _tier_1_hint(machine))
    if machine.gvnic_only and not plain.is_on(said, "gvnic", default=True):
        yield Finding((*where, "gvnic"), f"{name} has only Google's network interface", "remove gvnic: false")
    yield from _local_ssds(nodes, machine)
    yield from _disks_of(nodes, machine)


def _tier_1_hint(machine: Machine) -> str:
    from_vcpus = {
        f: facts["tier_1_from"] for f, facts in machines.data()["families"].items() if "tier_1_from" in facts
    }
    if machine.family in from_vcpus:
        return f"{machine.family} has it from {from_vcpus[machine.family]} processors on"
    return f"take a large machine type of {either(from_vcpus)}"


def _local_ssds(nodes: Nodes, machine: Machine) -> Iterator[Finding]:
    asked, at = plain.whole(nodes.said, "local_ssds") or 0, (*nodes.where, "local_ssds")
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
        kind = plain.text(disk, "type")
        if kind is not None and kind not in allowed:
            what = "start from" if at[-1] == "boot_disk" else "have"
            message = f"{machine.name} can't {what} a disk of {shown(kind)}"
            yield Finding((*at, "type"), message, f"write {either(allowed)}, or nothing")
    size_mib = plain.size_mib(plain.mapping(nodes.said, "boot_disk"), "size")
    if size_mib is None or nodes.said.get("image") or size_mib < _LEAST_DISK_MIB or size_mib % GIB_MIB:
        return
    least = _LEAST_BOOT_WITH_GPU_MIB if machine.gpu else _LEAST_BOOT_MIB
    if size_mib < least:
        image = "the default image with NVIDIA's driver" if machine.gpu else "the default image"
        message = f"{image} needs {format_size(least)}, not {format_size(size_mib)}"
        yield Finding((*nodes.where, "boot_disk", "size"), message, f"write {format_size(least)} or more")
