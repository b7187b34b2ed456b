"""A spec as Terraform's variables, and the folder that holds them beside our module and the state.

Files of ours are kept as this clusterctl has them. `*_override.tf` are the user's, others are Terraform's;
plain `terraform` works on the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import UsageError
from clusterctl.providers.gcp.terraform.client import BACKEND_FILE
from clusterctl.spec import gcp, gcp_nodes
from clusterctl.spec.common import ADMIN_USER, Partition
from clusterctl.spec.gcp import GcpProvider, GcsState
from clusterctl.spec.gcp_nodes import GcpDisk, GcpNodes, Machine, image_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import GIB_MIB
from clusterctl.state.inventory import CONTROLLER
from clusterctl.state.workspace import write_atomic
from clusterctl.util.assets import asset, tree_files

_SERVICES: Final = ("compute", "iam", "iap", "serviceusage", "cloudresourcemanager", "logging", "monitoring")

Variables = dict[str, Any]


def variables(spec: ClusterSpec, cluster_id: str, public_key: str) -> Variables:
    """The variables of the root module, as JSON has them. The spec's provider is Google Cloud."""
    settings = gcp.settings_of(spec)
    share = settings.filestore
    common = {"project", "zone", "labels", "enable_apis", "kms_key", "secure_boot", "bucket"}
    network = {"network": {"cidr", "network", "subnetwork"}}
    return {
        **settings.model_dump(mode="json", include={**dict.fromkeys(common, True), **network}),
        "region": settings.region_name,
        "cluster": spec.name,
        "cluster_id": cluster_id,
        "admin_user": ADMIN_USER,
        "admin_public_key": public_key.strip(),
        "services": services(settings),
        "auto_down": settings.auto_down is not None,
        "hosts": _hosts(spec, settings, cluster_id),
        "placements": [
            placement(spec, cluster_id, partition)
            for partition in spec.partitions
            if settings.nodes_of(partition.name).compact_placement
        ],
        "filestore": share and {"tier": share.tier, "capacity_gib": share.capacity // GIB_MIB},
    }


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
    controller = _host(settings.controller, gcp.controller_machine(spec))
    hosts: dict[str, Variables] = {spec.controller_host: {"role": "controller", **controller}}
    for partition in spec.partitions:
        nodes = settings.nodes_of(partition.name)
        policy = placement(spec, cluster_id, partition) if nodes.compact_placement else None
        host = _host(nodes, gcp.machine_of(spec, partition))
        host |= {"role": "compute", "partition": partition.name, "placement": policy}
        hosts |= dict.fromkeys(spec.node_names(partition), host)
    return hosts


def _host(nodes: GcpNodes, machine: Machine) -> Variables:
    added = machine.gpu if machine.guest_accelerator else None
    asked = {"local_ssds", "spot", "termination_action", "tier_1", "reservation"}
    return {
        **nodes.model_dump(mode="json", include=asked),
        "machine_type": machine.name,
        "image": image_of(nodes, machine).model_dump(mode="json"),
        "boot_disk": _disk(nodes.boot_disk, gcp_nodes.boot_disk_type(machine, nodes.boot_disk)),
        "extra_disks": [_disk(disk, gcp_nodes.extra_disk_type(machine, disk)) for disk in nodes.extra_disks],
        "guest_accelerator": {"type": machine.accelerator, "count": added.count} if added else None,
        "has_gpu": machine.gpu is not None,
        "nic_type": "GVNIC" if nodes.gvnic or machine.gvnic_only else "VIRTIO_NET",
    }


def _disk(disk: GcpDisk, kind: str) -> Variables:
    return {"size_gib": disk.size // GIB_MIB, "type": kind}


VARIABLES: Final = "clusterctl.auto.tfvars.json"
_BACKEND: Final = "clusterctl_backend.tf.json"


def has_module(folder: Path) -> bool:
    """Whether there is a module in it, and perhaps a state."""
    return (folder / "main.tf").is_file()


def controller_of(folder: Path) -> str:
    """The name of the controller that was asked for last; "" if that can't be read."""
    try:
        hosts = json.loads((folder / VARIABLES).read_bytes())["hosts"].items()
    except (OSError, ValueError, KeyError):
        return ""
    return next((name for name, host in hosts if host["role"] == CONTROLLER), "")


def write_module(folder: Path, variables: Mapping[str, Any], state: GcsState | None, *, cluster: str) -> None:
    """Bring our files up to date; what has not changed is left alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    backend = _backend(state, cluster)
    _refuse_moved_state(folder, backend)
    source = asset("terraform") / "gcp"
    wanted = {path.relative_to(source): path.read_bytes() for path in tree_files(source)}
    for path in [*folder.glob("*.tf"), *folder.glob("modules/**/*.tf")]:
        if path.relative_to(folder) not in wanted and not path.name.endswith("_override.tf"):
            path.unlink()  # of an older module
    for inner, content in wanted.items():
        _write(folder / inner, content)
    for name, text in backend.items():
        _write(folder / name, text.encode())
    _write(folder / VARIABLES, (json.dumps(variables, indent=2) + "\n").encode())


def _backend(state: GcsState | None, cluster: str) -> dict[str, str]:
    if state is None:
        return {}
    where = {"bucket": state.bucket, "prefix": f"{state.prefix}/{cluster}"}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in where.items()]
    return {BACKEND_FILE: "".join(lines), _BACKEND: '{"terraform": {"backend": {"gcs": {}}}}\n'}


def _refuse_moved_state(folder: Path, backend: Mapping[str, str]) -> None:
    """With a state that it does not find, Terraform would make everything a second time."""
    if not has_module(folder):
        return
    path = folder / BACKEND_FILE
    before = path.read_text() if path.is_file() else None
    if before != backend.get(BACKEND_FILE):
        raise UsageError(
            "the state of a cluster that is up is not moved",
            where="provider.state",
            why=f"it is {f'where {path} says' if before else f'in {folder}'}",
            fix="put provider.state back, or take the cluster down first",
        )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content)
