"""A spec as the variables of terraform/gcp: partitions become a map of hosts, which modules only build."""

from __future__ import annotations

from typing import Any, Final

from clusterctl.spec import gcp_machines
from clusterctl.spec.gcp import Bucket, Filestore, GcpDisk, GcpNodes, GcpProvider
from clusterctl.spec.gcp_machines import Machine, image_of
from clusterctl.spec.models import ADMIN_USER, ClusterSpec, Partition
from clusterctl.spec.units import GIB_MIB

_SERVICES: Final = ("compute", "iam", "iap", "serviceusage", "cloudresourcemanager", "logging", "monitoring")

Variables = dict[str, Any]


def variables(spec: ClusterSpec, cluster_id: str, public_key: str) -> Variables:
    """The variables of the root module, as JSON has them. The spec's provider is Google Cloud."""
    settings = settings_of(spec)
    return {
        "project": settings.project,
        "region": settings.region_name,
        "zone": settings.zone,
        "cluster": spec.name,
        "cluster_id": cluster_id,
        "labels": dict(settings.labels),
        "admin_user": ADMIN_USER,
        "admin_public_key": public_key.strip(),
        "enable_apis": settings.enable_apis,
        "services": services(settings),
        "network": {
            "cidr": str(settings.network.cidr),
            "network": settings.network.network,
            "subnetwork": settings.network.subnetwork,
        },
        "kms_key": settings.kms_key,
        "secure_boot": settings.secure_boot,
        "auto_down": settings.auto_down is not None,
        "hosts": _hosts(spec, settings, cluster_id),
        "placements": [
            placement(spec, cluster_id, partition)
            for partition in spec.partitions
            if settings.nodes_of(partition.name).compact_placement
        ],
        "filestore": _filestore(settings.filestore),
        "bucket": _bucket(settings.bucket),
    }


def settings_of(spec: ClusterSpec) -> GcpProvider:
    """What a spec whose provider is Google Cloud says of it."""
    if not isinstance(spec.provider, GcpProvider):
        raise TypeError(f"the provider of {spec.name} is {spec.provider.type}")
    return spec.provider


def services(settings: GcpProvider) -> list[str]:
    """Google's services that the cluster needs, in the order in which they are named to the user."""
    wanted = [*_SERVICES]
    if settings.bucket or settings.state:
        wanted.append("storage")
    if settings.filestore:
        wanted.append("file")
    return [f"{name}.googleapis.com" for name in wanted]


def placement(spec: ClusterSpec, cluster_id: str, partition: Partition) -> str:
    """The name of a partition's compact placement policy."""
    return f"{spec.name}-{cluster_id}-{partition.name}"


def _hosts(spec: ClusterSpec, settings: GcpProvider, cluster_id: str) -> dict[str, Variables]:
    controller = _host(settings.controller, gcp_machines.controller_machine(spec))
    hosts = {spec.controller_host: {"role": "controller", "partition": None, **controller, "placement": None}}
    for partition in spec.partitions:
        nodes = settings.nodes_of(partition.name)
        policy = placement(spec, cluster_id, partition) if nodes.compact_placement else None
        host = {
            "role": "compute",
            "partition": partition.name,
            **_host(nodes, gcp_machines.machine_of(spec, partition)),
        }
        hosts |= {name: {**host, "placement": policy} for name in spec.node_names(partition)}
    return hosts


def _host(nodes: GcpNodes, machine: Machine) -> Variables:
    added = machine.gpu if machine.guest_accelerator else None
    return {
        "machine_type": machine.name,
        "image": image_of(nodes, machine).model_dump(mode="json"),
        "boot_disk": _disk(nodes.boot_disk, gcp_machines.boot_disk_type(machine, nodes.boot_disk)),
        "extra_disks": [
            _disk(disk, gcp_machines.extra_disk_type(machine, disk)) for disk in nodes.extra_disks
        ],
        "local_ssds": nodes.local_ssds,
        "guest_accelerator": {"type": machine.accelerator, "count": added.count} if added else None,
        "has_gpu": machine.gpu is not None,
        "spot": nodes.spot,
        "termination_action": nodes.termination_action,
        "nic_type": "GVNIC" if nodes.gvnic or machine.gvnic_only else "VIRTIO_NET",
        "tier_1": nodes.tier_1,
        "reservation": nodes.reservation,
    }


def _disk(disk: GcpDisk, kind: str) -> Variables:
    return {"size_gib": disk.size // GIB_MIB, "type": kind}


def _filestore(filestore: Filestore | None) -> Variables | None:
    if filestore is None:
        return None
    return {"tier": filestore.tier, "capacity_gib": filestore.capacity // GIB_MIB}


def _bucket(bucket: Bucket | None) -> Variables | None:
    return None if bucket is None else bucket.model_dump(mode="json")
