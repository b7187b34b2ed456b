"""Prices of Google Cloud in USD an hour, by a dated table. An unknown price is None, never a guess."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clusterctl.providers.gcp.terraform import STATE_FILE
from clusterctl.spec import gcp, gcp_nodes
from clusterctl.spec.common import Partition
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import GIB_MIB
from clusterctl.util.assets import table as read_table

HOURS_A_MONTH: Final = 730.0  # as Google counts
LOCAL_SSD_GIB: Final = 375


def table() -> dict[str, Any]:
    """The prices of one region on one day, as prices.yaml explains them."""
    return read_table(Path(__file__).with_name("data") / "prices.yaml", dict[str, Any])


def caveat(region: str) -> str:
    """What must be known of its prices in this region; "" if nothing."""
    known = table()["region"]
    return "" if region == known else f"prices are Google's list prices of {known}; those of {region} differ"


def of_disk(kind: str, gib: float) -> float | None:
    return of_gib(table()["disks"].get(kind), gib)


def of_nat(hosts: int) -> float:
    """Cloud NAT for this many hosts, with the one address that it takes."""
    nat: dict[str, float] = table()["nat"]
    return min(hosts, nat["machines"]) * nat["machine"] + float(table()["address"])


def of_gib(usd_a_month: float | None, gib: float) -> float | None:
    """An hour of what is charged by GiB and month."""
    return None if usd_a_month is None else usd_a_month * gib / HOURS_A_MONTH


def total(parts: Iterable[float | None]) -> float | None:
    """The sum; not known as soon as one part is not."""
    known = tuple(parts)
    return None if None in known else sum(filter(None, known))


def of_machine(
    name: str, gpus: Mapping[str, int], *, spot: bool, own: Mapping[str, float] = MappingProxyType({})
) -> float | None:
    """A machine without its disks. ``gpus``: those that are added to it, by Google's name; ``own`` prices of
    machine types, which have their GPUs in them, come before the table's.
    """
    known, machine = table(), gcp_nodes.machines().get(name)
    if name in own:
        return own[name]
    if not spot and name in known["machines"]:
        return float(known["machines"][name])
    family = known["families"].get(machine.family, {}) if machine else {}
    each_of = family.get("spot") if spot else family
    if machine is None or not each_of:
        return None
    bundled = {machine.accelerator: machine.gpu.count} if machine.gpu and machine.accelerator else {}
    each = {kind: gpu.get("spot" if spot else "each") for kind, gpu in known["gpus"].items()}
    added = ((each.get(kind), count) for kind, count in {**bundled, **gpus}.items())
    parts = [machine.vcpus * each_of["vcpu"], machine.memory_mib / GIB_MIB * each_of["gib"]]
    return total([*parts, *(usd and usd * count for usd, count in added)])


def of_local_ssds(count: int, *, spot: bool) -> float | None:
    """Local disks that are added to a machine; what they cost with a spot machine is in no table."""
    if count == 0:
        return 0.0
    return None if spot else of_gib(table()["local_ssd"], count * LOCAL_SSD_GIB)


INSTANCE: Final = "google_compute_instance"
OFF: Final = frozenset({"TERMINATED", "STOPPED", "SUSPENDED"})
Attributes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostPrices:
    """What instances of a cluster cost: by partition first, then by machine type, then by the built-in table.

    cluster: its name, with which its nodes' names begin.
    """

    cluster: str
    partitions: Mapping[str, float] = field(default_factory=dict)
    machines: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def by(cls, spec: ClusterSpec) -> HostPrices:
        given = {p.name: p.price_per_hour for p in spec.partitions if p.price_per_hour is not None}
        return cls(spec.name, given, gcp.settings_of(spec).prices)

    def of(self, instance: Attributes) -> float | None:
        """Return what an instance of Terraform's costs, with its boot disk and local disks."""
        node = re.fullmatch(rf"{re.escape(self.cluster)}-(.+)-[0-9]+", str(instance.get("name")))
        if node and node[1] in self.partitions and instance.get("current_status") not in OFF:
            return self.partitions[node[1]]
        return _of_instance(instance, self.machines)


def node_price(spec: ClusterSpec, partition: Partition) -> float | None:
    """What the machine, the GPUs and the disks of a partition's node cost."""
    settings, machine = gcp.settings_of(spec), gcp.machine_of(spec, partition)
    nodes = settings.nodes_of(partition.name)
    added = machine.gpu if machine.guest_accelerator else None
    gpus = {str(machine.accelerator): added.count} if added else {}
    extra = ((gcp_nodes.disk_type(disk, machine.extra_disks), disk.size) for disk in nodes.extra_disks)
    disks = ((gcp_nodes.disk_type(nodes.boot_disk, machine.boot_disks), nodes.boot_disk.size), *extra)
    return total(
        [
            of_machine(machine.name, gpus, spot=nodes.spot, own=settings.prices),
            of_local_ssds(nodes.local_ssds, spot=nodes.spot),
            *(of_disk(kind, mib / GIB_MIB) for kind, mib in disks),
        ]
    )


def others(resources: Iterable[tuple[str, Attributes]]) -> tuple[float, tuple[str, ...]]:
    """What all of Terraform's resources that are no instance cost together, and those of unknown price."""
    known, unknown = 0.0, []
    resources = tuple(resources)
    hosts = sum(kind == INSTANCE for kind, _ in resources)
    for kind, attributes in resources:
        price = _of_other(kind, attributes, hosts)
        if price is None:
            unknown.append(str(attributes.get("name")))
        known += price or 0.0
    return known, tuple(unknown)


def recorded(spec: ClusterSpec, folder: Path) -> float | None:
    """What Terraform's state in its folder costs; None without one, or where a price in it is unknown."""
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    made = [one for one in state.get("resources", ()) if one["mode"] == "managed"]
    found = [(one["type"], each["attributes"]) for one in made for each in one["instances"]]
    prices, (known, unpriced) = HostPrices.by(spec), others(found)
    hosts = [prices.of(attributes) for kind, attributes in found if kind == INSTANCE]
    return None if unpriced else total([known, *hosts])


def of_row(kind: str, row: Attributes) -> float | None:
    """What something that the REST API shows costs; 0 for what Google does not charge for by the hour."""
    match kind:
        case "instance":
            added = row.get("guestAccelerators", ())
            gpus = {_last_part(gpu["acceleratorType"]): gpu["acceleratorCount"] for gpu in added}
            spot = row.get("scheduling", {}).get("provisioningModel") == "SPOT"
            price = of_machine(_last_part(row.get("machineType", "")), gpus, spot=spot)
            return 0.0 if row.get("status") in OFF else price  # its disks are shown by themselves
        case "disk":
            return of_disk(_last_part(row["type"]), float(row["sizeGb"]))
        case "shared folder":
            gib = sum(float(share["capacityGb"]) for share in row.get("fileShares", ()))
            return of_gib(table()["filestore"].get(str(row.get("tier", ""))), gib)
        case "address" | "router":  # Cloud NAT is charged for by machines, which go first, and by its address
            return float(table()["address"])
        case "bucket":
            return None
        case _:
            return 0.0


def _of_instance(instance: Attributes, own: Mapping[str, float]) -> float | None:
    name = str(instance.get("machine_type"))
    spot = any(each.get("provisioning_model") == "SPOT" for each in instance.get("scheduling") or ())
    accelerators = instance.get("guest_accelerator") or ()
    gpus = {_last_part(str(gpu["type"])): int(gpu["count"]) for gpu in accelerators}
    known = gcp_nodes.machines().get(name)
    added = max(len(instance.get("scratch_disk") or ()) - (known.bundled_ssds if known else 0), 0)
    off = instance.get("current_status") in OFF
    running = [of_machine(name, gpus, spot=spot, own=own), of_local_ssds(added, spot=spot)]
    boot = [p for disk in instance.get("boot_disk") or () for p in disk.get("initialize_params") or ()]
    disks = (of_disk(str(disk.get("type")), float(disk.get("size") or 0)) for disk in boot)
    return total([*([] if off else running), *disks])


def _of_other(kind: str, attributes: Attributes, hosts: int) -> float | None:
    match kind:
        case "google_compute_disk":
            return of_disk(str(attributes.get("type")), float(attributes.get("size") or 0))
        case "google_filestore_instance":
            gib = sum(float(share["capacity_gb"]) for share in attributes.get("file_shares") or ())
            return of_gib(table()["filestore"].get(str(attributes.get("tier"))), gib)
        case "google_compute_router_nat":
            return of_nat(hosts)
        case _:
            return 0.0


def _last_part(url: str) -> str:
    return url.rpartition("/")[2]
