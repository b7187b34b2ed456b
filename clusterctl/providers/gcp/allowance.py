"""What a project allows: the quotas that hosts count for, and the policies of its organization."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.providers.gcp.api import enforces
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.gcp_nodes import GcpNodes, Image, Machine, disk_type
from clusterctl.spec.units import GIB_MIB

_LOCAL_SSD_GB: Final = 375
# Of families of machine types that have one; those of the others are by GPU.
_CPUS: Final = {"e2": "CPUS", "n1": "CPUS"} | {
    one: f"{one.upper()}_CPUS" for one in ("n2", "n2d", "c2", "c2d", "c3", "a2")
}
_DISK_METRICS: Final = {
    **dict.fromkeys(("pd-balanced", "pd-ssd"), "SSD_TOTAL_GB"),
    **{"pd-standard": "DISKS_TOTAL_GB", "hyperdisk-balanced": "HDB_TOTAL_GB"},
}


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts that are made alike: the controller, or the nodes of a partition that are not there yet."""

    name: str
    nodes: GcpNodes
    machine: Machine
    image: Image
    count: int

    @property
    def who(self) -> str:
        return f"partition {self.name}" if self.name else "controller"


def demand(groups: Collection[HostGroup]) -> tuple[Counter[str], Counter[str]]:
    """Metric -> how much of it is needed: in the region, and in the whole project."""
    regional, everywhere = Counter[str](), Counter[str]()
    for group in groups:
        regional += _disks(group)
        if not group.nodes.reservation:  # its processors and GPUs count already
            gpus = group.machine.gpu.count if group.machine.gpu else 0
            regional += _used(group)
            everywhere.update(GPUS_ALL_REGIONS=gpus * group.count)
            everywhere.update(CPUS_ALL_REGIONS=group.machine.vcpus * group.count)
    return regional, everywhere


def _used(group: HostGroup) -> Counter[str]:
    """What the processors, GPUs and local disks of these hosts count for in the quotas of their region."""
    machine, nodes, count = group.machine, group.nodes, group.count
    found = Counter({"INSTANCES": count})
    if (cpus := _CPUS.get(machine.family)) and not nodes.spot:
        found[cpus] += machine.vcpus * count
    if machine.gpu is not None:
        name = machine.gpu.type.upper().replace("-", "_")
        found[f"{'PREEMPTIBLE_' if nodes.spot else ''}NVIDIA_{name}_GPUS"] += machine.gpu.count * count
    if nodes.local_ssds:
        metric = "PREEMPTIBLE_LOCAL_SSD_GB" if nodes.spot else "LOCAL_SSD_TOTAL_GB"
        found[metric] += nodes.local_ssds * _LOCAL_SSD_GB * count
    if nodes.compact_placement:
        found["RESOURCE_POLICIES"] += 1
    return found


def _disks(group: HostGroup) -> Counter[str]:
    """What their persistent disks count for."""
    boot, extra = group.machine.boot_disks, group.machine.extra_disks
    disks = ((group.nodes.boot_disk, boot), *((disk, extra) for disk in group.nodes.extra_disks))
    found = Counter[str]()
    for disk, known in disks:
        found[_DISK_METRICS[disk_type(disk, known)]] += disk.size // GIB_MIB * group.count
    return found


def forbidden(
    policy: Mapping[str, Any], needs: str | None, settings: GcpSettings, groups: Collection[HostGroup]
) -> str | None:
    """What of ours it forbids; None if nothing."""
    if needs is None:
        return "it" if enforces(policy) else None
    listed = policy.get("listPolicy", {})
    allowed = {_bare(one) for one in listed.get("allowedValues", ())}
    denied = {_bare(one) for one in listed.get("deniedValues", ())}
    if any(map(_undecided, allowed)):  # such as a folder, which this project may be in
        allowed = set()
    for name, spellings in _needed(needs, settings, groups).items():
        if listed.get("allValues") == "DENY" or denied & spellings or (allowed and not allowed & spellings):
            return name
    return None


def _needed(kind: str, settings: GcpSettings, groups: Collection[HostGroup]) -> Mapping[str, set[str]]:
    """What we need of a kind, each in all the ways in which a policy may name it."""
    zone, region = settings.zone, settings.region_name
    match kind:
        case "image_projects":
            own = [settings.project] if settings.bakes else []
            names = [*own, *(one.image.project for one in groups)]
            return {name: {f"projects/{name}"} for name in names}
        case "subnetworks":  # of a new network; a subnetwork of the user's has a way out already, or not
            return {} if settings.network.network else {"Cloud NAT": {f"under:projects/{settings.project}"}}
        case "compute":
            return {"compute": {"compute.googleapis.com"}}
    near = {f"in:{name}-locations" for name in _enclosing(region)}
    return {zone: {zone, region, f"in:{zone}-locations", f"in:{region}-locations", *near}}


_MULTI: Final = {"europe": ("eu", "europe"), "us": ("us", "northamerica")}
_GROUP: Final = re.compile(
    r"in:(us|eu|europe|asia|northamerica|southamerica|australia|africa|me|[a-z]+-[a-z]+\d+(-[a-z])?)-locations"
)


def _bare(value: str) -> str:
    return value.removeprefix("is:")


def _undecided(allowed: str) -> bool:
    """Whether it can't be told here what belongs to a value of a policy."""
    outer = allowed.startswith(("under:organizations/", "under:folders/"))
    return outer or (allowed.startswith("in:") and _GROUP.fullmatch(allowed) is None)


def _enclosing(region: str) -> Iterator[str]:
    """The groups of locations that a region may be meant by."""
    continent = region.partition("-")[0]
    yield from _MULTI.get(continent, (continent,))
