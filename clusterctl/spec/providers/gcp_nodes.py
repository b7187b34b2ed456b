"""Instances of Google Cloud: their settings, disks and images, and checks of the combinations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from clusterctl.spec.base import (
    PATTERNS,
    UNKNOWN,
    DurationS,
    Loc,
    SizeMib,
    SpecFault,
    SpecModel,
    Toggle,
    at_least,
    at_most,
    either,
)
from clusterctl.spec.common import Gpus
from clusterctl.spec.providers.gcp_machines import (
    DiskType,
    GcpMachineType,
    counts,
    data,
    default_machine,
    gpu_type,
    most_vcpus,
    unknown_gpu,
    unknown_machine,
    with_added,
)
from clusterctl.spec.units import GIB_MIB
from clusterctl.util import formatting

Project = Annotated[str, PATTERNS["project"]]
Resource = Annotated[str, PATTERNS["resource"]]


class Image(SpecModel):
    """The image of a boot disk: the newest of a family, or an image by name."""

    project: Project = Field(description="the project of the image")
    family: Resource | None = Field(None, description="use the newest image of this family")
    name: Resource | None = Field(None, description="use the image with this name")


class GcpDisk(SpecModel):
    """A persistent disk."""

    size: SizeMib = Field(description="its size, in whole GiB")
    type: DiskType | None = Field(
        None,
        description="its type; by default pd-balanced, or hyperdisk-balanced if the machine type needs "
        "it",
    )


class GcpNodes(SpecModel):
    """The instances of a partition, or the controller, on Google Cloud."""

    machine_type: Annotated[str, PATTERNS["machine_type"]] | None = Field(
        None, description="by default the smallest with the partition's GPUs, or with 4 processors"
    )
    image: Image | None = Field(
        None, description="by default Rocky Linux 9, with NVIDIA's driver for nodes with GPUs"
    )
    boot_disk: GcpDisk = Field(
        GcpDisk.model_validate({"size": "50GiB"}), description="the boot disk of each instance"
    )
    local_ssds: Annotated[int, Field(ge=0, le=32, strict=True)] = Field(
        0,
        description="number of local NVMe disks of 375 GiB, as /scratch; their data is lost with the "
        "node",
    )
    spot: Toggle = Field(
        False, description="use spot instances: cheaper, but Google may preempt them"
    )
    termination_action: Literal["STOP", "DELETE"] = Field(
        "STOP", description="whether a preempted spot node is stopped or deleted"
    )
    flex_start: Annotated[DurationS, at_least("10m"), at_most("7d")] | None = Field(
        None,
        description="use flex-start instances: cheaper; Google deletes them after this time, 10m to 7d",
    )
    compact_placement: Toggle = Field(
        False, description="use a compact placement policy, for low latency"
    )
    tier_1: Toggle = Field(
        False, description="TIER_1 networking, on large machine types; needs gvnic"
    )
    gvnic: Toggle = Field(True, description="Google's own network interface, instead of virtio")
    reservation: Annotated[str, PATTERNS["reservation"]] | None = Field(
        None,
        description="a reservation, or a block of it, that the instances use; also of another project",
    )

    @property
    def provisioning_model(self) -> str:
        """Google's name of the way to get the instances. A reservation counts as STANDARD."""
        return "SPOT" if self.spot else "FLEX_START" if self.flex_start else "STANDARD"


def disk_type(disk: GcpDisk, allowed: Sequence[str]) -> str:
    """Return the type of a disk: the type in the spec, or else the first type in ``allowed``."""
    return disk.type or allowed[0]


PLAIN_IMAGE: Final = Image(project="rocky-linux-cloud", family="rocky-linux-9-optimized-gcp")
GPU_IMAGE: Final = Image(
    project="rocky-linux-accelerator-cloud", family="rocky-linux-9-optimized-gcp-nvidia-580"
)
# Google's own projects. Only their image names contain the distribution.
_PUBLIC: Final = frozenset(
    "debian-cloud ubuntu-os-cloud ubuntu-os-accelerator-images ubuntu-os-pro-cloud "
    "rocky-linux-cloud rocky-linux-accelerator-cloud almalinux-cloud rhel-cloud centos-cloud "
    "cloud-hpc-image-public deeplearning-platform-release".split()
)
_NAMED: Final = re.compile(
    r"(?:^|-)(?P<id>debian|ubuntu|rocky|almalinux|rhel|centos)(?:-[a-z]+)*-(?P<number>\d+)"
)
# Number of digits in the names of Ubuntu's releases, such as 2404.
_YEAR_AND_MONTH: Final = 4


def image_of(nodes: GcpNodes, machine: GcpMachineType) -> Image:
    """Return the image that the spec sets for these nodes, otherwise the default for their machine
    type.
    """
    return nodes.image or (GPU_IMAGE if machine.gpu else PLAIN_IMAGE)


def release_of(image: Image) -> str | None:
    """Return the distribution in the name of an image from Google, such as ``rocky-9``, if any."""
    match = _NAMED.search(image.family or image.name or "") if image.project in _PUBLIC else None
    if match is None:
        return None
    number = match["number"]
    if match["id"] == "ubuntu" and len(number) == _YEAR_AND_MONTH:
        number = f"{number[:2]}.{number[2:]}"
    return f"{match['id']}-{number}"


# The sizes of the default images, without and with NVIDIA's driver.
_LEAST_BOOT_MIB: Final = 20 * GIB_MIB
_LEAST_BOOT_WITH_GPU_MIB: Final = 50 * GIB_MIB


@dataclass(frozen=True, slots=True)
class LocatedNodes:
    """The settings of a partition's nodes or the controller, with their locations in the spec.

    where: location of the settings.
    gpus_at: location of the partition's ``gpus``.
    machine_types: name -> machine type, for all that clusterctl or the spec knows.
    """

    name: str
    where: Loc
    settings: GcpNodes
    machine_types: Mapping[str, GcpMachineType]
    gpus: Gpus | None = None
    gpus_at: Loc = ()

    @property
    def machine_at(self) -> Loc:
        return (
            (*self.where, "machine_type") if self.settings.machine_type else (*self.gpus_at, "type")
        )


def check(nodes: LocatedNodes) -> tuple[GcpMachineType | None, list[SpecFault]]:
    """Return (machine type of the nodes or ``None``, faults in the nodes' settings)."""
    faults = [*_machine_independent_faults(nodes)]
    machine = _machine_or_fault(nodes)
    if isinstance(machine, SpecFault):
        return None, [machine, *faults]
    if machine is not None:
        faults += _machine_faults(nodes, machine)
    return machine, faults


def _machine_or_fault(nodes: LocatedNodes) -> GcpMachineType | SpecFault | None:
    """Return the nodes' machine type, or a fault, or ``None`` if another check reports the
    fault.
    """
    gpus = nodes.gpus
    name = nodes.settings.machine_type
    if gpus is not None:
        if gpus.type is UNKNOWN or gpus.count is UNKNOWN:
            return None
        short_name = gpu_type(gpus.type)
        if short_name is None:
            return unknown_gpu(gpus.type, (*nodes.gpus_at, "type"))
        gpus = Gpus(type=short_name, count=gpus.count)
        if gpus.count not in counts(short_name):
            hint = f"write count: {either(counts(short_name))}"
            return SpecFault(
                "gpu-count", (*nodes.gpus_at, "count"), f"a node can't have {gpus}", hint
            )
    if name is None:
        return default_machine(gpus)
    return None if name is UNKNOWN else _named_machine(nodes, name, gpus)


def _named_machine(nodes: LocatedNodes, name: str, gpus: Gpus | None) -> GcpMachineType | SpecFault:
    at = (*nodes.where, "machine_type")
    named = nodes.machine_types.get(name)
    if named is None:
        return unknown_machine(name, at, nodes.machine_types)
    if gpus is None or named.gpu == gpus:
        return named
    suitable = default_machine(gpus).name
    limit = most_vcpus(gpus)
    if named.gpu is not None:
        message = f"machine type {name} has {named.gpu}, not the {gpus} that {nodes.name} requests"
        return SpecFault("machine-has-other-gpus", at, message, f"use {suitable}, which has {gpus}")
    if limit is None or named.family != "n1":
        message = f"machine type {name} can't have {gpus}"
        return SpecFault("machine-without-gpus", at, message, f"use {suitable}, which has {gpus}")
    if named.vcpus > limit:
        message = f"{name} has {named.vcpus} processors, but the maximum with {gpus} is {limit}"
        return SpecFault(
            "machine-too-large", at, message, "use a smaller machine type, or more GPUs"
        )
    return with_added(named, gpus)


def _machine_independent_faults(nodes: LocatedNodes) -> Iterator[SpecFault]:
    settings = nodes.settings
    at = nodes.where
    ways = [key for key in ("spot", "flex_start", "reservation") if getattr(settings, key)]
    if len(ways) > 1:
        message = f"nodes can't have {' and '.join(ways)} together"
        hint = f"keep one of them: {' or '.join(ways)}"
        yield SpecFault("provisioning-twice", (*at, ways[1]), message, hint)
    if settings.termination_action == "DELETE" and settings.spot is False:
        message = "termination_action is only for spot nodes"
        hint = "remove termination_action, or write spot: true"
        yield SpecFault("needs-spot", (*at, "termination_action"), message, hint)
    if settings.image and (settings.image.family is None) == (settings.image.name is None):
        message = "an image needs either a family or a name"
        hint = (
            "write family: NAME or name: NAME"
            if settings.image.name is None
            else "remove either key"
        )
        yield SpecFault("image-family-or-name", (*at, "image"), message, hint, at_key=True)
    yield from disk_size((*at, "boot_disk", "size"), settings.boot_disk.size)


def disk_size(at: Loc, size_mib: int) -> Iterator[SpecFault]:
    """Yield a fault, at the location ``at`` in the spec, if the size of a disk or of Filestore is not in
    GiB, as Terraform has it.
    """
    if size_mib and size_mib % GIB_MIB:
        message = f"the size must be in whole GiB, not {formatting.exact_size(size_mib)}"
        yield SpecFault("disk-size", at, message, f"write {size_mib // GIB_MIB + 1}GiB")


def _machine_faults(nodes: LocatedNodes, machine: GcpMachineType) -> Iterator[SpecFault]:
    settings = nodes.settings
    name = machine.name
    if machine.only and all(getattr(settings, way) in {None, False} for way in machine.only):
        ways = {
            "spot": "write spot: true",
            "reservation": "name a reservation",
            "flex_start": "write flex_start: 2d",
        }
        hint = ", or ".join(ways[way] for way in machine.only)
        yield SpecFault(
            "machine-not-on-demand", nodes.machine_at, f"{name} is not available on demand", hint
        )
    if machine.gpu and not settings.image and data()["gpus"][machine.gpu.type].get("closed_driver"):
        reason = "the driver's open kernel modules need a t4 or newer"
        message = f"the default image's driver does not support {machine.gpu.type}: {reason}"
        hint = (
            f"set an image for {nodes.name} with NVIDIA's proprietary driver, branch 580 or older"
        )
        at = (*nodes.gpus_at, "type") if nodes.gpus_at else nodes.machine_at
        yield SpecFault("gpu-needs-closed-driver", at, message, hint)
    if machine.arm:
        message = f"{name} has Arm processors, but clusterctl supports only x86_64"
        yield SpecFault(
            "machine-architecture", nodes.machine_at, message, "use machines of another type"
        )
    yield from _boot_disk_faults(nodes, machine)


def _boot_disk_faults(nodes: LocatedNodes, machine: GcpMachineType) -> Iterator[SpecFault]:
    size_mib = nodes.settings.boot_disk.size
    if not size_mib or nodes.settings.image or size_mib % GIB_MIB:
        return
    least = _LEAST_BOOT_WITH_GPU_MIB if machine.gpu else _LEAST_BOOT_MIB
    if size_mib < least:
        image = "the default image with NVIDIA's driver" if machine.gpu else "the default image"
        message = (
            f"{image} needs {formatting.exact_size(least)}, not {formatting.exact_size(size_mib)}"
        )
        place = (*nodes.where, "boot_disk", "size")
        yield SpecFault(
            "boot-disk-too-small", place, message, f"write {formatting.exact_size(least)} or more"
        )
