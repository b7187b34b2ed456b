"""Prices of Google Cloud in USD an hour, from a dated table. None: the table lacks the price."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterctl.providers.gcp.terraform import STATE_FILE
from clusterctl.spec.common import Partition
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp, gcp_machines, gcp_nodes
from clusterctl.spec.units import GIB_MIB
from clusterctl.util.assets import read_table

_DISCOUNTED: Final = ("SPOT", "FLEX_START")
# Google's definition of a month.
HOURS_A_MONTH: Final = 730.0
LOCAL_SSD_GIB: Final = 375


def table() -> dict[str, Any]:
    """Return the content of prices.yaml: Google's list prices in a region. The file explains its
    format.
    """
    return read_table(Path(__file__).with_name("data") / "prices.yaml", dict[str, Any])


def caveat(region: str) -> str:
    """Return a warning that the prices are those of another region than ``region``, or else ""."""
    priced_region = table()["region"]
    if region == priced_region:
        return ""
    return f"prices are Google's list prices for {priced_region}; prices in {region} differ"


def of_disk(kind: str, gib: float) -> float | None:
    return of_gib(table()["disks"].get(kind), gib)


def of_nat(hosts: int) -> float:
    """Return the hourly price of Cloud NAT for this many hosts, including NAT's IP address."""
    nat: dict[str, float] = table()["nat"]
    return min(hosts, nat["machines"]) * nat["machine"] + float(table()["address"])


def of_gib(usd_a_month: float | None, gib: float) -> float | None:
    """Return the hourly price of ``gib`` GiB of storage. ``usd_a_month``: price of 1 GiB. None:
    unknown.
    """
    return None if usd_a_month is None else usd_a_month * gib / HOURS_A_MONTH


def total(parts: Iterable[float | None]) -> float | None:
    """Return the sum of prices. None: a price is unknown."""
    costs = tuple(parts)
    return None if None in costs else sum(filter(None, costs))


def of_machine(name: str, gpus: Mapping[str, int], *, model: str) -> float | None:
    """Return the hourly price of a machine type without disks. ``gpus``: Google's name of added GPU
    -> count.

    model: the provisioning model, such as STANDARD; FLEX_START has no prices in the table.
    """
    spot = model == "SPOT"
    prices = table()
    machine = gcp_machines.machines().get(name)
    if model == "FLEX_START":
        return None
    if not spot and name in prices["machines"]:
        return float(prices["machines"][name])
    family = prices["families"].get(machine.family, {}) if machine else {}
    price_per_unit = family.get("spot") if spot else family
    if machine is None or not price_per_unit:
        return None
    bundled = (
        {machine.accelerator: machine.gpu.count} if machine.gpu and machine.accelerator else {}
    )
    price_of_gpu = {
        kind: gpu.get("spot" if spot else "each") for kind, gpu in prices["gpus"].items()
    }
    added = ((price_of_gpu.get(kind), count) for kind, count in {**bundled, **gpus}.items())
    parts = [
        machine.vcpus * price_per_unit["vcpu"],
        machine.memory_mib / GIB_MIB * price_per_unit["gib"],
    ]
    return total([*parts, *(usd and usd * count for usd, count in added)])


@dataclass(frozen=True, slots=True)
class BilledHost:
    """What Google bills of a host, as a spec, Google's API or Terraform's state describes it.

    gpus: Google's name of a GPU added to the machine type -> count. model: the provisioning model.
    local_ssds: number of local disks added to the machine type. disks: type and GiB of each disk.
    """

    machine: str
    gpus: Mapping[str, int]
    model: str
    is_off: bool = False
    local_ssds: int = 0
    disks: tuple[tuple[str, float], ...] = ()

    def usd_per_hour(self) -> float | None:
        """Return the hourly price. Only disks cost if the host is off."""
        parts = [of_disk(kind, gib) for kind, gib in self.disks]
        if not self.is_off:
            parts += [
                of_machine(self.machine, self.gpus, model=self.model),
                self._usd_of_local_ssds(),
            ]
        return total(parts)

    def _usd_of_local_ssds(self) -> float | None:
        if self.local_ssds == 0:
            return 0.0
        if self.model in _DISCOUNTED:
            return None
        return of_gib(table()["local_ssd"], self.local_ssds * LOCAL_SSD_GIB)


INSTANCE: Final = "google_compute_instance"
OFF: Final = frozenset({"TERMINATED", "STOPPED", "SUSPENDED"})
Attributes = Mapping[str, Any]


def provisioning_model(instance: Attributes) -> str:
    """Return the provisioning model of an instance, as Terraform describes it."""
    models = (each.get("provisioning_model") for each in instance.get("scheduling") or ())
    return next(filter(None, models), "STANDARD")


@dataclass(frozen=True, slots=True)
class HostPrices:
    """The user's prices for partitions. All other prices come from the price table."""

    cluster: str
    partitions: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def by(cls, spec: ClusterSpec) -> HostPrices:
        partition_prices = {
            p.name: p.price_per_hour for p in spec.partitions if p.price_per_hour is not None
        }
        return cls(spec.name, partition_prices)

    def of(self, instance: Attributes) -> float | None:
        """Return the hourly price of an instance, as Terraform describes it, with boot and local
        disks.
        """
        node = re.fullmatch(rf"{re.escape(self.cluster)}-(.+)-[0-9]+", str(instance.get("name")))
        if node and node[1] in self.partitions and instance.get("current_status") not in OFF:
            return self.partitions[node[1]]
        return _host_of_terraform(instance).usd_per_hour()


def node_price(spec: ClusterSpec, partition: Partition) -> float | None:
    """Return the hourly price of a partition's node."""
    settings = gcp.settings_of(spec)
    machine = gcp.machine_of(spec, partition)
    nodes = settings.nodes_of(partition.name)
    added = machine.gpu if machine.guest_accelerator else None
    gpus = {str(machine.accelerator): added.count} if added else {}
    disk = nodes.boot_disk
    host = BilledHost(
        machine.name,
        gpus,
        nodes.provisioning_model,
        local_ssds=nodes.local_ssds,
        disks=((gcp_nodes.disk_type(disk, machine.disk_types), disk.size / GIB_MIB),),
    )
    return host.usd_per_hour()


def other_costs(resources: Iterable[tuple[str, Attributes]]) -> tuple[float, tuple[str, ...]]:
    """Return (hourly price of all resources except instances, names of resources with an unknown
    price).
    """
    total_cost = 0.0
    unpriced = []
    resources = tuple(resources)
    hosts = sum(kind == INSTANCE for kind, _ in resources)
    for kind, attributes in resources:
        price = _of_other(kind, attributes, hosts)
        if price is None:
            unpriced.append(str(attributes.get("name")))
        total_cost += price or 0.0
    return total_cost, tuple(unpriced)


def recorded_cost(spec: ClusterSpec, folder: Path) -> float | None:
    """Return the hourly price of all resources in the Terraform state in ``folder``, if it is
    known. It is unknown if a user's backend keeps the state elsewhere.
    """
    # Where Terraform notes the backend.
    if (folder / ".terraform" / STATE_FILE).exists():
        return None
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    managed = [entry for entry in state.get("resources", ()) if entry["mode"] == "managed"]
    instances = ((entry["type"], instance) for entry in managed for instance in entry["instances"])
    resources = [(kind, instance["attributes"]) for kind, instance in instances]
    prices = HostPrices.by(spec)
    total_cost, unpriced = other_costs(resources)
    hosts = [prices.of(attributes) for kind, attributes in resources if kind == INSTANCE]
    return None if unpriced else total([total_cost, *hosts])


def of_row(kind: str, row: Attributes) -> float | None:
    """Return the hourly price of a resource (``row``: from the REST API). 0: not billed by the
    hour.
    """
    match kind:
        case "instance":
            return _host_of_api(row).usd_per_hour()
        case "disk":
            return of_disk(_last_part(row["type"]), float(row["sizeGb"]))
        case "shared folder":
            gib = sum(float(share["capacityGb"]) for share in row.get("fileShares", ()))
            return of_gib(table()["filestore"].get(str(row.get("tier", ""))), gib)
        case "address" | "router":
            # Cloud NAT costs per machine and for its address. The machines are deleted before it.
            return float(table()["address"])
        case "bucket":
            return None
        case _:
            return 0.0


def _host_of_api(row: Attributes) -> BilledHost:
    """Return the host of an instance. The API lists its disks separately."""
    added = row.get("guestAccelerators", ())
    return BilledHost(
        _last_part(row.get("machineType", "")),
        {_last_part(gpu["acceleratorType"]): gpu["acceleratorCount"] for gpu in added},
        row.get("scheduling", {}).get("provisioningModel", "STANDARD"),
        is_off=row.get("status") in OFF,
    )


def _host_of_terraform(instance: Attributes) -> BilledHost:
    name = str(instance.get("machine_type"))
    accelerators = instance.get("guest_accelerator") or ()
    gpus = {_last_part(str(gpu["type"])): int(gpu["count"]) for gpu in accelerators}
    machine = gcp_machines.machines().get(name)
    added = max(
        len(instance.get("scratch_disk") or ()) - (machine.bundled_ssds if machine else 0), 0
    )
    boot = [
        p for disk in instance.get("boot_disk") or () for p in disk.get("initialize_params") or ()
    ]
    return BilledHost(
        name,
        gpus,
        provisioning_model(instance),
        is_off=instance.get("current_status") in OFF,
        local_ssds=added,
        disks=tuple((str(disk.get("type")), float(disk.get("size") or 0)) for disk in boot),
    )


def _of_other(kind: str, attributes: Attributes, hosts: int) -> float | None:
    match kind:
        case "google_filestore_instance":
            gib = sum(float(share["capacity_gb"]) for share in attributes.get("file_shares") or ())
            return of_gib(table()["filestore"].get(str(attributes.get("tier"))), gib)
        case "google_compute_router_nat":
            return of_nat(hosts)
        case _:
            return 0.0


def _last_part(url: str) -> str:
    return url.rpartition("/")[2]
