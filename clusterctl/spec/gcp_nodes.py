"""Instances of Google Cloud: machine types, disks, images, and what must hold between them.

What a machine type is (processors, memory, GPUs, what may be combined with it) is data: data/google.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from clusterctl.errors import BadValueError
from clusterctl.spec.base import (
    PATTERNS,
    UNKNOWN,
    Fault,
    Loc,
    Model,
    SizeMib,
    Toggle,
    either,
)
from clusterctl.spec.common import Gpus
from clusterctl.spec.names import DATA, did_you_mean
from clusterctl.spec.units import GIB_MIB, format_size, shown
from clusterctl.util.assets import table

Project = Annotated[str, PATTERNS["project"]]
Resource = Annotated[str, PATTERNS["resource"]]


class Image(Model):
    """The image of a boot disk: the newest of a family, or one by its name."""

    project: Project = Field(description="the project of the image")
    family: Resource | None = Field(None, description="the newest image of this family")
    name: Resource | None = Field(None, description="the image of this name")


class GcpDisk(Model):
    """A persistent disk."""

    size: SizeMib = Field(description="its size, in whole GiB")
    type: Literal["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"] | None = Field(
        None,
        description="by default pd-balanced, or hyperdisk-balanced where the machine type takes no other",
    )


class GcpNodes(Model):
    """The instances of one partition, or of the controller, on Google Cloud."""

    machine_type: Annotated[str, PATTERNS["machine_type"]] | None = Field(
        None, description="by default the smallest that has the partition's GPUs, or 4 processors"
    )
    image: Image | None = Field(
        None,
        description="by default Rocky Linux 9, with NVIDIA's driver where there is a GPU",
    )
    boot_disk: GcpDisk = Field(GcpDisk.model_validate({"size": "50GiB"}), description="their boot disk")
    extra_disks: tuple[GcpDisk, ...] = Field((), description="more persistent disks for each")
    local_ssds: Annotated[int, Field(ge=0, le=32, strict=True)] = Field(
        0, description="local NVMe disks of 375 GiB for each, as /scratch; gone with the node"
    )
    spot: Toggle = Field(False, description="cheaper, and preempted by Google at any time")
    termination_action: Literal["STOP", "DELETE"] = Field(
        "STOP", description="what happens to a spot node that is preempted"
    )
    compact_placement: Toggle = Field(False, description="a compact placement policy, for low latency")
    tier_1: Toggle = Field(False, description="TIER_1 networking, on large machine types; needs gvnic")
    gvnic: Toggle = Field(True, description="Google's own network interface, instead of virtio")
    reservation: Resource | None = Field(None, description="a reservation of yours that they consume")


PLAIN: Final = "e2-standard-4"  # where nothing is asked for
_VCPUS_BESIDE_A_GPU: Final = 4  # of the N1 machine that is chosen for GPUs that are added to it


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine type.

    ``gpu`` has our short name, ``accelerator`` is what Google calls it; ``guest_accelerator`` where it is
    added to the machine rather than a part of it. ``local_ssds`` are the numbers of disks that may be added,
    ``bundled_ssds`` those that are there already. ``only``: how to get it, where not on demand.
    ``reservation_bound``: from a reservation it is had by the provisioning model of that name.
    """

    name: str
    family: str
    vcpus: int
    memory_mib: int
    gpu: Gpus | None = None
    accelerator: str | None = None
    guest_accelerator: bool = False
    compact_placement: bool = False
    tier_1: bool = False
    gvnic_only: bool = False
    local_ssds: tuple[int, ...] = ()
    bundled_ssds: int = 0
    boot_disks: tuple[str, ...] = ()
    extra_disks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    reservation_bound: bool = False

    @property
    def has_nvswitches(self) -> bool:
        """Whether NVSwitches link its GPUs, which the machine may show or hide."""
        return bool(self.gpu and self.gpu.count > 1 and data()["gpus"][self.gpu.type].get("nvswitches"))


@cache
def data() -> Mapping[str, Any]:
    return table(DATA / "google.toml", dict[str, Any])


@cache
def machines() -> Mapping[str, Machine]:
    """All machine types by name, without GPUs added to them; those of a family from the smallest on."""
    rows: dict[str, Mapping[str, Any]] = {
        f"{series}-{vcpus}": {"vcpus": vcpus, "gib": facts["gib"] * vcpus}
        for series, facts in data()["series"].items()
        for vcpus in facts["vcpus"]
    }
    rows |= data()["special"] | data()["with_gpus"]
    return {name: _machine(name, row) for name, row in rows.items()}


def _machine(name: str, row: Mapping[str, Any]) -> Machine:
    family, vcpus = name.partition("-")[0], row["vcpus"]
    facts = {**data()["families"][family], **row}
    steps = facts.get("local_ssds_up_to", ())
    return Machine(
        name,
        family,
        vcpus,
        int(facts["gib"] * GIB_MIB),
        gpu=Gpus(type=row["gpu"], count=row["count"]) if "gpu" in row else None,
        accelerator=_google(row["gpu"]) if "gpu" in row else None,
        compact_placement=facts.get("compact_placement", False),
        tier_1=vcpus >= facts.get("tier_1_from", vcpus + 1),
        gvnic_only=facts.get("gvnic_only", False),
        local_ssds=tuple(facts.get("local_ssds") or next((n for most, n in steps if vcpus <= most), ())),
        bundled_ssds=facts.get("bundled_ssds", 0),
        boot_disks=tuple(facts["boot_disks"]),
        extra_disks=tuple(facts.get("extra_disks", facts["boot_disks"])),
        only=tuple(facts.get("only", ())),
        reservation_bound=facts.get("reservation_bound", False),
    )


def gpu_type(name: str) -> str | None:
    """Our short name of a GPU model, from that or from Google's name."""
    by_google = {facts["google"]: short for short, facts in data()["gpus"].items()}
    return name if name in data()["gpus"] else by_google.get(name)


def counts(gpu: str) -> tuple[int, ...]:
    """How many GPUs of a model, by its short name, a node can have."""
    attached = {int(count) for count in data()["attached"].get(gpu, {})}
    bundled = {one.gpu.count for one in machines().values() if one.gpu and one.gpu.type == gpu}
    return tuple(sorted(attached | bundled))


def most_vcpus(gpus: Gpus) -> int | None:
    """Processors that an N1 machine may have beside these GPUs; None where they are not added to N1."""
    limit: int | None = data()["attached"].get(gpus.type, {}).get(str(gpus.count))
    return limit


def default_machine(gpus: Gpus | None) -> Machine:
    """The smallest machine type with these GPUs; ``PLAIN`` without any.

    Raises:
        ValueError: no machine type has them. A checked spec does not ask for such.
    """
    if gpus is None:
        return machines()[PLAIN]
    if most_vcpus(gpus) is not None:
        return with_added(machines()[f"n1-standard-{_VCPUS_BESIDE_A_GPU * gpus.count}"], gpus)
    for one in machines().values():
        if one.gpu == gpus:
            return one
    raise BadValueError("gpu-count", f"no machine type has {gpus}")


def with_added(one: Machine, gpus: Gpus) -> Machine:
    """An N1 machine with GPUs added to it."""
    return replace(one, gpu=gpus, accelerator=_google(gpus.type), guest_accelerator=True)


def disk_type(disk: GcpDisk, known: Sequence[str]) -> str:
    """The type of a disk: what is asked for, or the default of those that the machine knows."""
    return disk.type or known[0]


def _google(gpu: str) -> str:
    return str(data()["gpus"][gpu]["google"])


PLAIN_IMAGE: Final = Image(project="rocky-linux-cloud", family="rocky-linux-9-optimized-gcp")
GPU_IMAGE: Final = Image(
    project="rocky-linux-accelerator-cloud", family="rocky-linux-9-optimized-gcp-nvidia-580"
)
# Whose images are what they are called: Google's own projects. Anybody else's are looked at once they run.
_PUBLIC: Final = frozenset(
    "debian-cloud ubuntu-os-cloud ubuntu-os-accelerator-images ubuntu-os-pro-cloud rocky-linux-cloud "
    "rocky-linux-accelerator-cloud almalinux-cloud rhel-cloud centos-cloud cloud-hpc-image-public "
    "deeplearning-platform-release".split()
)
_NAMED: Final = re.compile(
    r"(?:^|-)(?P<id>debian|ubuntu|rocky|almalinux|rhel|centos)(?:-[a-z]+)*-(?P<number>\d+)"
)
_YEAR_AND_MONTH: Final = 4  # digits of Ubuntu's releases


def image_of(nodes: GcpNodes, machine: Machine) -> Image:
    """The image of these nodes: the spec's, else the default of their machine type."""
    return nodes.image or (GPU_IMAGE if machine.gpu else PLAIN_IMAGE)


def release_of(image: Image) -> str | None:
    """What is in an image of Google's own: ``rocky-9``. None: its name does not say it."""
    found = _NAMED.search(image.family or image.name or "") if image.project in _PUBLIC else None
    if found is None:
        return None
    number = found["number"]
    if found["id"] == "ubuntu" and len(number) == _YEAR_AND_MONTH:
        number = f"{number[:2]}.{number[2:]}"
    return f"{found['id']}-{number}"


_LEAST_DISK_MIB: Final = 10 * GIB_MIB
_LEAST_BOOT_MIB: Final = 20 * GIB_MIB  # what the default image needs
_LEAST_BOOT_WITH_GPU_MIB: Final = 50 * GIB_MIB  # and the one with NVIDIA's driver
_MOST_DISK_MIB: Final = 64 * 1024 * GIB_MIB


@dataclass(frozen=True, slots=True)
class Nodes:
    """What is said of some nodes: under ``where`` in the spec, and which GPUs, at ``gpus_at``."""

    name: str
    where: Loc
    said: GcpNodes
    gpus: Gpus | None = None
    gpus_at: Loc = ()

    @property
    def machine_at(self) -> Loc:
        return (*self.where, "machine_type") if self.said.machine_type else (*self.gpus_at, "type")


def check(nodes: Nodes) -> tuple[Machine | None, list[Fault]]:
    """The machine type that these nodes get, where it can be told, and what is wrong with them."""
    faults, machine = [*_of_any_machine(nodes)], _resolved(nodes)
    if isinstance(machine, Fault):
        return None, [machine, *faults]
    if machine is not None:
        faults += _of_this_machine(nodes, machine)
    return machine, faults


def _resolved(nodes: Nodes) -> Machine | Fault | None:
    """The machine type, or why there is none; None where that is reported by a field itself."""
    wanted, name = nodes.gpus, nodes.said.machine_type
    if wanted is not None:
        if wanted.type is UNKNOWN or wanted.count is UNKNOWN:
            return None
        known = gpu_type(wanted.type)
        if known is None:
            names = tuple(data()["gpus"])
            hint = did_you_mean(wanted.type, names) or f"it has {', '.join(names)}"
            message = f"Google Cloud has no GPU {shown(wanted.type)}"
            return Fault("unknown-gpu", (*nodes.gpus_at, "type"), message, hint)
        wanted = Gpus(type=known, count=wanted.count)
        if wanted.count not in counts(known):
            hint = f"write count: {either(counts(known))}"
            return Fault("gpu-count", (*nodes.gpus_at, "count"), f"a node can't have {wanted}", hint)
    if name is None:
        return default_machine(wanted)
    return None if name is UNKNOWN else _named(nodes, name, wanted)


def _named(nodes: Nodes, name: str, wanted: Gpus | None) -> Machine | Fault:
    at, named = (*nodes.where, "machine_type"), machines().get(name)
    if named is None:
        hint = did_you_mean(name, machines()) or f"families: {', '.join(data()['families'])}"
        return Fault("unknown-machine-type", at, f"there is no machine type {shown(name)}", hint)
    if wanted is None or named.gpu == wanted:
        return named
    better, limit = default_machine(wanted).name, most_vcpus(wanted)
    if named.gpu is not None:
        message = f"{name} has {named.gpu}, not the {wanted} that {nodes.name} asks for"
        return Fault("machine-has-other-gpus", at, message, f"{wanted} is what {better} has")
    if limit is None or named.family != "n1":
        return Fault("machine-without-gpus", at, f"{name} can't have {wanted}", f"{better} has it")
    if named.vcpus > limit:
        message = f"{name} has {named.vcpus} processors, but beside {wanted} there may be at most {limit}"
        return Fault("machine-too-large", at, message, "take a smaller machine type, or more GPUs")
    return with_added(named, wanted)


def _of_any_machine(nodes: Nodes) -> Iterator[Fault]:
    said, at = nodes.said, nodes.where
    if said.spot and said.reservation:
        message = "a spot node can't be taken from a reservation"
        yield Fault("spot-in-reservation", (*at, "reservation"), message, "remove reservation, or spot: true")
    if said.spot and said.compact_placement:
        message = "spot nodes can't have compact placement: a preempted one may restart elsewhere"
        yield Fault(
            "spot-placement", (*at, "compact_placement"), message, "remove compact_placement, or spot: true"
        )
    if said.termination_action == "DELETE" and said.spot is False:
        message = "termination_action is for spot nodes only"
        yield Fault("needs-spot", (*at, "termination_action"), message, "remove it, or write spot: true")
    if said.tier_1 and said.gvnic is False:
        yield Fault("needs-gvnic", (*at, "gvnic"), "tier_1 needs gvnic", "remove gvnic: false, or tier_1")
    if said.image and (said.image.family is None) == (said.image.name is None):
        message = "an image has a family or a name, one of the two"
        hint = "write family: NAME or name: NAME" if said.image.name is None else "keep one of them"
        yield Fault("image-family-or-name", (*at, "image"), message, hint, at_key=True)
    for place, disk in _disks(nodes):
        yield from disk_size((*place, "size"), disk.size)


def _disks(nodes: Nodes) -> Iterator[tuple[Loc, GcpDisk]]:
    yield (*nodes.where, "boot_disk"), nodes.said.boot_disk
    for index, disk in enumerate(nodes.said.extra_disks):
        yield (*nodes.where, "extra_disks", index), disk


def disk_size(at: Loc, size_mib: int) -> Iterator[Fault]:
    """What is wrong with the size of a disk."""
    if size_mib and size_mib % GIB_MIB:
        message = f"a disk has whole GiB, not {format_size(size_mib)}"
        yield Fault("disk-size", at, message, f"write {size_mib // GIB_MIB + 1}GiB")
    elif size_mib and not _LEAST_DISK_MIB <= size_mib <= _MOST_DISK_MIB:
        least, most = format_size(_LEAST_DISK_MIB), format_size(_MOST_DISK_MIB)
        yield Fault("disk-size", at, f"a disk has {least} to {most}, not {format_size(size_mib)}")


def _of_this_machine(nodes: Nodes, machine: Machine) -> Iterator[Fault]:
    said, name, where = nodes.said, machine.name, nodes.where
    if machine.only and all(getattr(said, way) in {None, False} for way in machine.only):
        ways = {"spot": "write spot: true", "reservation": "name a reservation"}
        hint = ", or ".join(ways[way] for way in machine.only)
        yield Fault("machine-not-on-demand", nodes.machine_at, f"{name} is not available on demand", hint)
    if said.compact_placement and not machine.compact_placement:
        near = (family for family, facts in data()["families"].items() if "compact_placement" in facts)
        message = f"nodes of {name} can't have compact placement"
        hint = f"take a machine type of {either(near)}"
        yield Fault("machine-without-placement", (*where, "compact_placement"), message, hint)
    if said.tier_1 and not machine.tier_1:
        message = f"{name} has no TIER_1 networking"
        yield Fault("machine-without-tier-1", (*where, "tier_1"), message, _tier_1_hint(machine))
    if machine.gvnic_only and said.gvnic is False:
        message = f"{name} has only Google's network interface"
        yield Fault("machine-needs-gvnic", (*where, "gvnic"), message, "remove gvnic: false")
    if machine.gpu and not said.image and data()["gpus"][machine.gpu.type].get("closed_driver"):
        why = "its open modules begin with t4"
        message = f"the default image's driver does not support {machine.gpu.type}: {why}"
        hint = f"name an image for {nodes.name} that has NVIDIA's proprietary driver, of branch 580 or older"
        at = (*nodes.gpus_at, "type") if nodes.gpus_at else nodes.machine_at
        yield Fault("gpu-needs-closed-driver", at, message, hint)
    yield from _local_ssds(nodes, machine)
    yield from _disks_of(nodes, machine)


def _tier_1_hint(machine: Machine) -> str:
    families = data()["families"].items()
    from_vcpus = {name: facts["tier_1_from"] for name, facts in families if "tier_1_from" in facts}
    if machine.family in from_vcpus:
        return f"{machine.family} has it from {from_vcpus[machine.family]} processors on"
    return f"take a large machine type of {either(from_vcpus)}"


def _local_ssds(nodes: Nodes, machine: Machine) -> Iterator[Fault]:
    asked, hint = nodes.said.local_ssds, "remove local_ssds"
    if not asked or asked in machine.local_ssds:
        return
    message = f"{machine.name} can't have local disks"
    if machine.bundled_ssds:
        message = f"{machine.name} has its {machine.bundled_ssds} local disks already"
    elif machine.local_ssds:
        message = f"{machine.name} can't have {asked} local disks"
        hint = f"it takes {either(machine.local_ssds)}, or none"
    yield Fault("local-disks", (*nodes.where, "local_ssds"), message, hint)


def _disks_of(nodes: Nodes, machine: Machine) -> Iterator[Fault]:
    for at, disk in _disks(nodes):
        is_boot = at[-1] == "boot_disk"
        allowed = machine.boot_disks if is_boot else machine.extra_disks
        if disk.type and disk.type not in allowed:
            message = (
                f"{machine.name} can't {'start from' if is_boot else 'have'} a disk of {shown(disk.type)}"
            )
            yield Fault("disk-type", (*at, "type"), message, f"write {either(allowed)}, or nothing")
    size_mib = nodes.said.boot_disk.size
    if not size_mib or nodes.said.image or size_mib < _LEAST_DISK_MIB or size_mib % GIB_MIB:
        return
    least = _LEAST_BOOT_WITH_GPU_MIB if machine.gpu else _LEAST_BOOT_MIB
    if size_mib < least:
        image = "the default image with NVIDIA's driver" if machine.gpu else "the default image"
        message = f"{image} needs {format_size(least)}, not {format_size(size_mib)}"
        place = (*nodes.where, "boot_disk", "size")
        yield Fault("boot-disk-too-small", place, message, f"write {format_size(least)} or more")
