"""The shared folder that outlives its cluster: a disk or a Filestore instance, known by its own labels.

It lacks the label of a cluster's id, so nothing that removes a cluster finds it. Terraform's state has it
while the cluster is up: ``write_imports`` takes it in, ``Terraform.forget`` leaves it out before all else is
destroyed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import UsageError
from clusterctl.providers.gcp import costs, orphans
from clusterctl.providers.gcp.api import Api, Json
from clusterctl.providers.gcp.terraform import BACKEND_FILE, STATE_FILE
from clusterctl.providers.storage import REMOVE, KeptStorage
from clusterctl.spec import gcp
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import GIB_MIB, format_size
from clusterctl.state.workspace import write_atomic

LABEL: Final = "clusterctl-storage"  # the cluster's name
USER_LABEL: Final = "clusterctl-user"  # of the first user, who with the name says whose it is
UID_LABEL: Final = "clusterctl-uid"
MODULE: Final = "module.storage"
_ADDRESSES: Final = {
    "disk": f"{MODULE}[0].google_compute_disk.shared[0]",
    "shared folder": f"{MODULE}[0].google_filestore_instance.shared[0]",
}
_IMPORTS: Final = "clusterctl_storage.tf.json"
VARIABLES: Final = "clusterctl.auto.tfvars.json"


def variable(spec: ClusterSpec, cluster_id: str, kept: KeptStorage | None) -> dict[str, Any] | None:
    """The module's variable `storage`: what is kept already, or a new one; None where nothing is kept."""
    if not spec.storage.keep:
        return None
    disk, share = gcp.shared_disk(spec), gcp.settings_of(spec).filestore
    return {
        "name": kept.id.rpartition("/")[2] if kept else f"{spec.name}-{cluster_id}-shared",
        "labels": {
            orphans.CLUSTER_LABEL: spec.name,
            LABEL: spec.name,
            USER_LABEL: spec.job_user.name,
            UID_LABEL: str(spec.job_user.uid),
        },
        "disk": {"size_gib": disk[0], "type": disk[1]} if disk else None,
        "filestore": {"tier": share.tier, "capacity_gib": share.capacity // GIB_MIB} if share else None,
    }


def find(api: Api, name: str, user: str) -> tuple[KeptStorage, ...]:
    """That of clusters of this name, whose first user is ``user``."""
    found = orphans.labelled(api, LABEL, name, _ADDRESSES)
    return tuple(_kept(name, *one) for one in found if orphans.read_labels(one[2]).get(USER_LABEL) == user)


def _kept(name: str, kind: str, path: str, row: Json) -> KeptStorage:
    labels, month = orphans.read_labels(row), costs.of_row(kind, row)
    gib = [row["sizeGb"]] if "sizeGb" in row else [share["capacityGb"] for share in row["fileShares"]]
    uid = labels.get(UID_LABEL, "")
    return KeptStorage(
        cluster=name,
        id=path,
        what=f"{kind} {path.rpartition('/')[2]} in {_place(path)}",
        kind=str(row["type"]).rpartition("/")[2] if "type" in row else str(row["tier"]),
        size_mib=sum(map(int, gib)) * GIB_MIB,
        usd_per_month=None if month is None else month * costs.HOURS_A_MONTH,
        homes={labels[USER_LABEL]: int(uid)} if uid.isdigit() else {},
    )


def _place(path: str) -> str:
    """The zone or region of `projects/P/zones/ZONE/disks/NAME`."""
    return path.split("/")[3]


def as_found(kept: KeptStorage) -> orphans.Found:
    """What is to be deleted."""
    kind, service = ("disk", "compute") if "/disks/" in kept.id else ("shared folder", "file")
    return orphans.Found(kind, kept.id.rpartition("/")[2], "", service, kept.id, "")


def refuse_used(api: Api, kept: KeptStorage) -> None:
    """Refuse to remove what a cluster has: Google deletes a Filestore instance that is mounted.

    Raises:
        UsageError: an instance has the disk, or one of a cluster of that name may have mounted the share.
    """
    if as_found(kept).kind == "disk":
        disks = orphans.labelled(api, LABEL, kept.cluster, ["disk"])
        users = [url for _, path, row in disks if path == kept.id for url in row.get("users", ())]
    else:
        instances = orphans.labelled(api, orphans.CLUSTER_LABEL, kept.cluster, ["instance"])
        zones = ((path, _place(path)) for _, path, _ in instances)
        users = [path for path, zone in zones if _place(kept.id) in {zone, zone.rpartition("-")[0]}]
    if users:
        what = f"a cluster {kept.cluster!r} has the kept storage, {kept.what}"
        names = sorted({f"instance {one.rpartition('/')[2]}" for one in users})
        fix = "take it down first, where its workspace is; without one: `clusterctl orphans remove`"
        raise UsageError(what, code="storage-in-use", why=f"there is {', '.join(names)}", fix=fix)


def refuse_another(spec: ClusterSpec, kept: KeptStorage) -> None:
    """That the spec asks for what is there: nothing of it can be changed but that a disk grows.

    Raises:
        UsageError: it asks for another kind, place, type or for less room.
    """
    settings, disk, share = gcp.settings_of(spec), gcp.shared_disk(spec), gcp.settings_of(spec).filestore
    place, size_mib, kind = settings.zone, 0, ""
    if disk:
        size_mib, kind = disk[0] * GIB_MIB, disk[1]
    elif share:
        size_mib, kind = share.capacity, share.tier
        place = settings.region_name if share.tier == "REGIONAL" else settings.zone
    is_smaller = size_mib < (kept.size_mib or 0)
    if (kind, place) != (kept.kind, _place(kept.id)) or is_smaller:
        raise UsageError(
            f"the spec does not fit the kept storage, {kept.what}",
            code="storage-unfit",
            where="storage.keep",
            why=f"it is {_shown(kept.kind, _place(kept.id), kept.size_mib)}; the spec asks for "
            f"{_shown(kind, place, size_mib)}, and only a disk can grow",
            fix="write what it is, name the cluster otherwise, or remove what was kept: "
            f"`{REMOVE.format(name=spec.name)}`",
        )


def _shown(kind: str, place: str, size_mib: int | None) -> str:
    return f"{kind} of {format_size(size_mib or 0)} in {place}"


def write_imports(folder: Path, kept: KeptStorage | None) -> None:
    """The file by which Terraform takes it into the state, unless that has it already."""
    path = folder / _IMPORTS
    if kept is None:
        path.unlink(missing_ok=True)
        return
    found = as_found(kept)
    write_atomic(path, json.dumps({"import": [{"to": _ADDRESSES[found.kind], "id": found.path}]}) + "\n")


def refuse_moved(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse to put the shared folder of a cluster that is up elsewhere: its files would not be there."""
    before = storage_of(folder)
    if not (folder / STATE_FILE).exists() and not (folder / BACKEND_FILE).exists():
        return
    if (before is None) != (wanted["storage"] is None):
        was, first = ("true", "") if before else ("false", "bring home what is there, and ")
        what = "storage.keep can't be changed while the cluster is up"
        why = f"it was `keep: {was}` at the first `up`, and the shared folder is not moved to another disk"
        fix = f"write `keep: {was}`, or {first}take the cluster down before you change it"
        raise UsageError(what, code="storage-keep-changed", where="storage.keep", why=why, fix=fix)


def storage_of(folder: Path) -> Mapping[str, Any] | None:
    """The module's variable `storage` as it was last asked for; None where nothing is kept."""
    storage: Mapping[str, Any] | None = asked_of(folder).get("storage")
    return storage


def asked_of(folder: Path) -> dict[str, Any]:
    """The module's variables as they were last asked for; empty if they can't be read."""
    try:
        return dict(json.loads((folder / VARIABLES).read_bytes()))
    except (OSError, ValueError):
        return {}
