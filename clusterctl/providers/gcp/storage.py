"""Storage on Google Cloud: a disk or a Filestore instance that outlives clusters.

Terraform creates it, with a state of its own. Clusters only use it. It lacks the label of a cluster's
id, so that deleting a cluster never finds it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.providers.gcp import costs, orphans
from clusterctl.providers.gcp.api import Api, Json
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp
from clusterctl.spec.units import GIB_MIB
from clusterctl.state.workspace import state_home

# The labels of a storage: its name, the name and uid of the first user of the spec that created it,
# and a random number, which the folder of the storage's Terraform state has, too.
LABEL: Final = "clusterctl-storage"
USER_LABEL: Final = "clusterctl-user"
UID_LABEL: Final = "clusterctl-uid"
ORIGIN_LABEL: Final = "clusterctl-origin"
# The label of the hosts that use a storage: its name.
USES_LABEL: Final = "clusterctl-uses-storage"
VARIABLES: Final = "clusterctl.auto.tfvars.json"


def folder(project: str, name: str) -> Path:
    """Return the folder of the Terraform state of a storage."""
    return state_home() / ".storage" / project / name


def own_variables(spec: ClusterSpec) -> dict[str, Any]:
    """Return the variables of the Terraform module that creates the spec's storage."""
    settings = gcp.settings_of(spec)
    disk = gcp.shared_disk(spec)
    share = settings.filestore
    is_shared_vpc = settings.network_project != settings.project
    network = f"projects/{settings.network_project}/global/networks/{settings.network.network}"
    return {
        **settings.model_dump(mode="json", include={"project", "zone", "kms_key", "enable_apis"}),
        "region": settings.region_name,
        "name": spec.storage.name,
        "labels": {
            **settings.labels,
            LABEL: spec.storage.name,
            USER_LABEL: spec.job_user.name,
            UID_LABEL: str(spec.job_user.uid),
            ORIGIN_LABEL: secrets.token_hex(8),
        },
        "services": ["file.googleapis.com" if share else "compute.googleapis.com"],
        "disk": disk and {"size_gib": disk[0], "type": disk[1]},
        "filestore": share and {"tier": share.tier, "capacity_gib": share.capacity // GIB_MIB},
        "network": network if share else None,
        "connect_mode": "PRIVATE_SERVICE_ACCESS" if is_shared_vpc else "DIRECT_PEERING",
    }


def usd_per_hour(spec: ClusterSpec, storage: KeptStorage | None) -> float | None:
    """Return the hourly price of the spec's storage; 0: it names no storage. None: unknown.

    storage: the storage of that name. None: it does not exist yet.
    """
    if spec.storage.name is None:
        return 0.0
    if storage:
        return storage.usd_per_month and storage.usd_per_month / costs.HOURS_A_MONTH
    if disk := gcp.shared_disk(spec):
        return costs.of_disk(disk[1], disk[0])
    share = gcp.settings_of(spec).filestore
    if share is None:
        return 0.0
    return costs.of_gib(costs.table()["filestore"].get(share.tier), share.capacity / GIB_MIB)


def variable(api: Api, spec: ClusterSpec, storage: KeptStorage | None) -> dict[str, Any] | None:
    """Return the cluster's Terraform variable `storage`. None: the spec names no storage.

    storage: the storage of that name. None: it does not exist yet.
    """
    name = spec.storage.name
    if name is None:
        return None
    settings = gcp.settings_of(spec)
    if storage is None and settings.filestore is None:
        path = f"projects/{settings.project}/zones/{settings.zone}/disks/{name}"
        return {"name": name, "disk": path}
    if storage is not None and _is_disk(storage):
        return {"name": name, "disk": storage.id}
    mount = _mount(api, storage) if storage else {"server": None, "path": "/", "range": None}
    return {"name": name, "filestore": mount}


def _mount(api: Api, storage: KeptStorage) -> dict[str, Any]:
    """Return server and path of a Filestore instance, and the range from which it calls hosts."""
    rows = orphans.find_labelled(api, LABEL, storage.name, ["shared folder"])
    row = next(row for _, path, row in rows if path == storage.id)
    addresses = [ip for network in row.get("networks", ()) for ip in network.get("ipAddresses", ())]
    if not addresses:
        raise ProvisionError(
            f"{storage.what} is not ready",
            code="cloud-refused",
            about="storage-not-ready",
            where="storage.name",
            why=f"Google says: {row.get('state')}",
            fix="run the command again in some minutes",
        )
    # See the output `range` of the module filestore.
    bits = 29 if str(row["tier"]).startswith("BASIC") else 24
    return {
        "server": addresses[0],
        "path": f"/{row['fileShares'][0]['name']}",
        "range": str(ip_network(f"{addresses[0]}/{bits}", strict=False)),
    }


def find(api: Api) -> tuple[KeptStorage, ...]:
    """Return all storages of the project."""
    hosts = {
        _in_zone(path): orphans.read_labels(row)
        for _, path, row in orphans.find_labelled(api, USES_LABEL, None, ["instance"])
    }
    rows = orphans.find_labelled(api, LABEL, None, ["disk", "shared folder"])
    return tuple(_storage(kind, path, row, hosts) for kind, path, row in rows)


def _storage(
    kind: str, path: str, row: Json, hosts: Mapping[str, Mapping[str, str]]
) -> KeptStorage:
    """hosts: the labels of the hosts that use any storage, by zone and name."""
    labels = orphans.read_labels(row)
    usd_per_hour = costs.of_row(kind, row)
    gib = (
        [row["sizeGb"]] if "sizeGb" in row else [share["capacityGb"] for share in row["fileShares"]]
    )
    uid = labels.get(UID_LABEL, "")
    users = [host for host, its in hosts.items() if its[USES_LABEL] == labels[LABEL]]
    # Other machines may have attached the disk.
    users += map(_in_zone, row.get("users", ()))
    here = read_variables(folder(path.split("/")[1], labels[LABEL])).get("labels", {})
    return KeptStorage(
        name=labels[LABEL],
        id=path,
        what=f"{kind} {path.rpartition('/')[2]} in {_place(path)}",
        kind=str(row["type"]).rpartition("/")[2] if "type" in row else str(row["tier"]),
        size_mib=sum(map(int, gib)) * GIB_MIB,
        usd_per_month=None if usd_per_hour is None else usd_per_hour * costs.HOURS_A_MONTH,
        users={
            (host.rpartition("/")[2], hosts.get(host, {}).get(orphans.ID_LABEL, ""))
            for host in users
        },
        homes={labels[USER_LABEL]: int(uid)} if uid.isdigit() else {},
        is_from_here=here.get(ORIGIN_LABEL) == labels.get(ORIGIN_LABEL, ""),
    )


def _in_zone(path: str) -> str:
    """Return the part of a host's path or link that follows `zones/`."""
    return path.rpartition("/zones/")[2]


def _place(path: str) -> str:
    return path.split("/")[3]


def _is_disk(storage: KeptStorage) -> bool:
    return "/disks/" in storage.id


def as_resource(storage: KeptStorage) -> orphans.CloudResource:
    kind, service = ("disk", "compute") if _is_disk(storage) else ("shared folder", "file")
    name = storage.id.rpartition("/")[2]
    return orphans.CloudResource(kind, name, "", service, storage.id, "")


def reject_elsewhere(spec: ClusterSpec, storage: KeptStorage) -> None:
    """Raise a UsageError if the controller can't have the storage, because it is in another zone."""
    settings = gcp.settings_of(spec)
    place = _place(storage.id)
    if _is_disk(storage) and place != settings.zone:
        raise UsageError(
            f"storage {storage.name!r} is in {place}, and the cluster in {settings.zone}",
            about="storage",
            where="storage.name",
            why=f"{storage.what} can only be attached to hosts of its zone",
            fix=f"set zone: {place}, or choose another storage",
        )


def read_variables(folder: Path) -> dict[str, Any]:
    """Return Terraform's variables, as last written to the folder. Empty if the file can't be
    read.
    """
    try:
        return dict(json.loads((folder / VARIABLES).read_bytes()))
    except (OSError, ValueError):
        return {}
