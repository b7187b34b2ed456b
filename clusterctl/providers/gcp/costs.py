"""What Terraform's and the API's resources cost, in USD an hour; None where it is not known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from clusterctl.providers.gcp import prices
from clusterctl.spec import gcp_machines
from clusterctl.spec.gcp import GcpProvider
from clusterctl.spec.models import ClusterSpec, Partition
from clusterctl.spec.units import GIB_MIB

OFF: Final = frozenset({"TERMINATED", "STOPPED", "SUSPENDED"})
Attributes = Mapping[str, Any]


def host_price(spec: ClusterSpec) -> Callable[[Attributes], float | None]:
    """What an instance of Terraform's costs under this spec, with its boot disk and local disks.

    A partition's `price_per_hour` comes first, then `provider.prices`, then the built-in table.
    """
    own = spec.provider.prices if isinstance(spec.provider, GcpProvider) else {}
    said = {p.name: p.price_per_hour for p in spec.partitions if p.price_per_hour is not None}

    def price(instance: Attributes) -> float | None:
        if instance.get("current_status") in OFF:
            return _of_instance(instance, own)
        node = re.fullmatch(rf"{re.escape(spec.name)}-(.+)-[0-9]+", str(instance.get("name")))
        if node and node[1] in said:
            return said[node[1]]
        return _of_instance(instance, own)

    return price


def node_price(spec: ClusterSpec, partition: Partition) -> float | None:
    """What the machine, the GPUs and the disks of a partition's node cost."""
    if not isinstance(spec.provider, GcpProvider):
        return None
    nodes, machine = spec.provider.nodes_of(partition.name), gcp_machines.machine_of(spec, partition)
    added = machine.gpu if machine.guest_accelerator else None
    gpus = {str(machine.accelerator): added.count} if added else {}
    extra = ((gcp_machines.extra_disk_type(machine, disk), disk.size) for disk in nodes.extra_disks)
    disks = ((gcp_machines.boot_disk_type(machine, nodes.boot_disk), nodes.boot_disk.size), *extra)
    return prices.total(
        [
            _machine(machine.name, gpus, spot=nodes.spot, own=spec.provider.prices),
            prices.of_local_ssds(nodes.local_ssds, spot=nodes.spot),
            *(prices.of_disk(kind, mib / GIB_MIB) for kind, mib in disks),
        ]
    )


def others(resources: Iterable[tuple[str, Attributes]]) -> tuple[float, tuple[str, ...]]:
    """What all of Terraform's resources that are no instance cost together, and those of unknown price."""
    known, unknown = 0.0, []
    resources = tuple(resources)
    hosts = sum(kind == "google_compute_instance" for kind, _ in resources)
    for kind, attributes in resources:
        price = _of_other(kind, attributes, hosts)
        if price is None:
            unknown.append(str(attributes.get("name")))
        known += price or 0.0
    return known, tuple(unknown)


def of_row(kind: str, row: Attributes) -> float | None:
    """What something that the REST API shows costs; 0 for what Google does not charge for by the hour."""
    match kind:
        case "instance":
            return _of_row_of_instance(row)
        case "disk":
            return prices.of_disk(_end(row["type"]), float(row["sizeGb"]))
        case "shared folder":
            gib = sum(float(share["capacityGb"]) for share in row.get("fileShares", ()))
            return prices.of_filestore(str(row.get("tier", "")), gib)
        case "address" | "router":  # Cloud NAT is charged for by machines, which go first, and by its address
            return prices.table().address
        case "bucket":
            return None
        case _:
            return 0.0


def _of_row_of_instance(row: Attributes) -> float | None:
    if row.get("status") in OFF:
        return 0.0  # its disks are charged for, and shown by themselves
    gpus = {_end(gpu["acceleratorType"]): gpu["acceleratorCount"] for gpu in row.get("guestAccelerators", ())}
    spot = row.get("scheduling", {}).get("provisioningModel") == "SPOT"
    return _machine(_end(row.get("machineType", "")), gpus, spot=spot)


def _of_instance(instance: Attributes, own: Mapping[str, float]) -> float | None:
    name = str(instance.get("machine_type"))
    spot = any(each.get("provisioning_model") == "SPOT" for each in instance.get("scheduling") or ())
    gpus = {_end(str(gpu["type"])): int(gpu["count"]) for gpu in instance.get("guest_accelerator") or ()}
    known = gcp_machines.machine(name)
    added = max(len(instance.get("scratch_disk") or ()) - (known.bundled_ssds if known else 0), 0)
    off = instance.get("current_status") in OFF
    running = [_machine(name, gpus, spot=spot, own=own), prices.of_local_ssds(added, spot=spot)]
    boot = [p for disk in instance.get("boot_disk") or () for p in disk.get("initialize_params") or ()]
    return prices.total(
        [
            *([] if off else running),
            *(prices.of_disk(str(disk.get("type")), float(disk.get("size") or 0)) for disk in boot),
        ]
    )


def _of_other(kind: str, attributes: Attributes, hosts: int) -> float | None:
    match kind:
        case "google_compute_disk":
            return prices.of_disk(str(attributes.get("type")), float(attributes.get("size") or 0))
        case "google_filestore_instance":
            gib = sum(float(share["capacity_gb"]) for share in attributes.get("file_shares") or ())
            return prices.of_filestore(str(attributes.get("tier")), gib)
        case "google_compute_router_nat":
            return prices.of_nat(hosts)
        case _:
            return 0.0


def _machine(
    name: str, gpus: Mapping[str, int], *, spot: bool, own: Mapping[str, float] | None = None
) -> float | None:
    return prices.of_machine(name, gpus, spot=spot, own=own or {})


def _end(url: str) -> str:
    return url.rpartition("/")[2]
