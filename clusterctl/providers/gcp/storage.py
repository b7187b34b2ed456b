"""The shared folder that `down` keeps on Google Cloud: a disk or a Filestore instance with labels
of its own.

Kept storage lacks the label of the cluster's id, so that deleting a cluster never finds it. While
the cluster is up, Terraform's state contains the storage: ``write_imports`` adds it, and
``Terraform.forget`` removes it from the state before the other resources are destroyed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import UsageError
from clusterctl.providers.gcp import costs, orphans
from clusterctl.providers.gcp.api import Api, Json
from clusterctl.providers.storage import REMOVE, KeptStorage
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp
from clusterctl.spec.units import GIB_MIB
from clusterctl.state.workspace import write_atomic
from clusterctl.util import formatting

# The labels of kept storage: the cluster's name, and the name and uid of the first user. Cluster
# and user together identify the owner.
LABEL: Final = "clusterctl-storage"
USER_LABEL: Final = "clusterctl-user"
UID_LABEL: Final = "clusterctl-uid"
MODULE: Final = "module.storage"
_ADDRESSES: Final = {
    "disk": f"{MODULE}[0].google_compute_disk.shared[0]",
    "shared folder": f"{MODULE}[0].google_filestore_instance.shared[0]",
}
_IMPORTS: Final = "clusterctl_storage.tf.json"
VARIABLES: Final = "clusterctl.auto.tfvars.json"


def variable(spec: ClusterSpec, cluster_id: str, kept: KeptStorage | None) -> dict[str, Any] | None:
    """Return Terraform's variable `storage` for ``kept`` or new storage. None: `storage.keep` is
    off.
    """
    if not spec.storage.keep:
        return None
    disk = gcp.shared_disk(spec)
    share = gcp.settings_of(spec).filestore
    return {
        "name": kept.id.rpartition("/")[2] if kept else f"{spec.name}-{cluster_id}-shared",
        "labels": {
            orphans.CLUSTER_LABEL: spec.name,
            LABEL: spec.name,
            USER_LABEL: spec.job_user.name,
            UID_LABEL: str(spec.job_user.uid),
        },
        "disk": {"size_gib": disk[0], "type": disk[1]} if disk else None,
        "filestore": {"tier": share.tier, "capacity_gib": share.capacity // GIB_MIB}
        if share
        else None,
    }


def find(api: Api, name: str, user: str) -> tuple[KeptStorage, ...]:
    """Return the kept storage of clusters called ``name`` with ``user`` as the first user of their
    spec.
    """
    resources = orphans.find_labelled(api, LABEL, name, _ADDRESSES)
    own = (r for r in resources if orphans.read_labels(r[2]).get(USER_LABEL) == user)
    return tuple(_kept(name, *resource) for resource in own)


def _kept(name: str, kind: str, path: str, row: Json) -> KeptStorage:
    labels = orphans.read_labels(row)
    usd_per_month = costs.of_row(kind, row)
    gib = (
        [row["sizeGb"]] if "sizeGb" in row else [share["capacityGb"] for share in row["fileShares"]]
    )
    uid = labels.get(UID_LABEL, "")
    return KeptStorage(
        cluster=name,
        id=path,
        what=f"{kind} {path.rpartition('/')[2]} in {_place(path)}",
        kind=str(row["type"]).rpartition("/")[2] if "type" in row else str(row["tier"]),
        size_mib=sum(map(int, gib)) * GIB_MIB,
        usd_per_month=None if usd_per_month is None else usd_per_month * costs.HOURS_A_MONTH,
        homes={labels[USER_LABEL]: int(uid)} if uid.isdigit() else {},
    )


def _place(path: str) -> str:
    return path.split("/")[3]


def as_resource(kept: KeptStorage) -> orphans.CloudResource:
    kind, service = ("disk", "compute") if "/disks/" in kept.id else ("shared folder", "file")
    return orphans.CloudResource(kind, kept.id.rpartition("/")[2], "", service, kept.id, "")


def reject_in_use(api: Api, kept: KeptStorage) -> None:
    """Raise a UsageError if instances may use the storage. Google would delete even a Filestore in
    use.
    """
    if as_resource(kept).kind == "disk":
        disks = orphans.find_labelled(api, LABEL, kept.cluster, ["disk"])
        users = [url for _, path, row in disks if path == kept.id for url in row.get("users", ())]
    else:
        instances = orphans.find_labelled(api, orphans.CLUSTER_LABEL, kept.cluster, ["instance"])
        zones = ((path, _place(path)) for _, path, _ in instances)
        users = [path for path, zone in zones if _place(kept.id) in {zone, zone.rpartition("-")[0]}]
    if users:
        message = f"a cluster {kept.cluster!r} uses the kept storage, {kept.what}"
        names = sorted({f"instance {path.rpartition('/')[2]}" for path in users})
        fix = "take that cluster down first; if its workspace is lost: `clusterctl orphans remove`"
        raise UsageError(message, code="storage-in-use", why=f"used by {', '.join(names)}", fix=fix)


def reject_mismatch(spec: ClusterSpec, kept: KeptStorage) -> None:
    """Raise a UsageError if the spec asks for another type or zone than ``kept`` has, or for less
    space.
    """
    settings = gcp.settings_of(spec)
    disk = gcp.shared_disk(spec)
    share = gcp.settings_of(spec).filestore
    place = settings.zone
    size_mib = 0
    kind = ""
    if disk:
        size_mib = disk[0] * GIB_MIB
        kind = disk[1]
    elif share:
        size_mib = share.capacity
        kind = share.tier
        place = settings.region_name if share.tier == "REGIONAL" else settings.zone
    is_smaller = size_mib < (kept.size_mib or 0)
    if (kind, place) != (kept.kind, _place(kept.id)) or is_smaller:
        raise UsageError(
            f"the spec does not match the kept storage, {kept.what}",
            code="storage-unfit",
            where="storage.keep",
            why=f"the storage is {_shown(kept.kind, _place(kept.id), kept.size_mib)}; the spec "
            f"asks for {_shown(kind, place, size_mib)}; the only possible change is a larger "
            "disk",
            fix="adapt the spec, rename the cluster, or remove the kept storage: "
            f"`{REMOVE.format(name=spec.name)}`",
        )


def _shown(kind: str, place: str, size_mib: int | None) -> str:
    return f"{kind} of {formatting.exact_size(size_mib or 0)} in {place}"


def write_imports(folder: Path, kept: KeptStorage | None) -> None:
    """Write the file that makes Terraform import the storage ``kept``. If ``kept`` is None, delete
    it.
    """
    path = folder / _IMPORTS
    if kept is None:
        path.unlink(missing_ok=True)
        return
    resource = as_resource(kept)
    block = {"to": _ADDRESSES[resource.kind], "id": resource.path}
    write_atomic(path, json.dumps({"import": [block]}) + "\n")


def reject_move(applied: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """Raise a UsageError if `storage.keep` changed while the cluster is up. clusterctl moves no
    files.
    """
    previous_storage = applied["storage"]
    if (previous_storage is None) != (variables["storage"] is None):
        old_value, copy_first = (
            ("true", "")
            if previous_storage
            else ("false", "copy your files to this machine, then ")
        )
        message = "storage.keep can't be changed while the cluster is up"
        reason = f"`keep` was {old_value} at the first `up`, and `up` can't move the shared folder"
        fix = f"set `keep: {old_value}`, or {copy_first}take the cluster down before you change it"
        raise UsageError(
            message, code="storage-keep-changed", where="storage.keep", why=reason, fix=fix
        )


def read_storage(folder: Path) -> Mapping[str, Any] | None:
    """Return Terraform's variable `storage`, as last written to the folder. None: `storage.keep`
    was off.
    """
    storage: Mapping[str, Any] | None = read_variables(folder).get("storage")
    return storage


def read_variables(folder: Path) -> dict[str, Any]:
    """Return Terraform's variables, as last written to the folder. Empty if the file can't be
    read.
    """
    try:
        return dict(json.loads((folder / VARIABLES).read_bytes()))
    except (OSError, ValueError):
        return {}
