"""Existing resources that a plan would create again: found at Google, and imported into Terraform's
state.

A resource is missing in the state if Terraform, its provider or clusterctl was interrupted or killed
while Google created it, or if the state was lost. Resources of other owners, which lack the label or
the mark with this cluster's id, are never imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from clusterctl.errors import ApiOffError
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.orphans import ID_LABEL, SearchArea, find_labelled
from clusterctl.providers.gcp.terraform import ResourceChange


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a resource of a Terraform type is: its kind in a search and its REST path.

    part: key of the list of the found resource that contains it, if it is a part of that resource.
    id: import id. Default: ``path``.
    """

    kind: str
    path: str
    part: str = ""
    id: str = ""


_ROUTER: Final = "projects/{project}/regions/{region}/routers/"
# Enabled APIs and members of policies are missing: to create them again changes nothing.
_PLACES: Final[Mapping[str, _Place]] = {
    "google_compute_firewall": _Place(
        "firewall rule", "projects/{project}/global/firewalls/{name}"
    ),
    "google_compute_instance": _Place(
        "instance", "projects/{project}/zones/{zone}/instances/{name}"
    ),
    "google_compute_network": _Place("network", "projects/{project}/global/networks/{name}"),
    "google_compute_resource_policy": _Place(
        "placement policy", "projects/{project}/regions/{region}/resourcePolicies/{name}"
    ),
    "google_compute_router": _Place("router", _ROUTER + "{name}"),
    "google_compute_router_nat": _Place(
        "router", _ROUTER + "{router}", part="nats", id=_ROUTER + "{router}/{name}"
    ),
    "google_compute_subnetwork": _Place(
        "subnetwork", "projects/{project}/regions/{region}/subnetworks/{name}"
    ),
    "google_filestore_instance": _Place(
        "shared folder", "projects/{project}/locations/{location}/instances/{name}"
    ),
    "google_service_account": _Place(
        "service account",
        "projects/{project}/serviceAccounts/{account_id}@{project}.iam.gserviceaccount.com",
    ),
    "google_storage_bucket": _Place("bucket", "b/{name}", id="{project}/{name}"),
}


def import_ids(
    api: Api, cluster_id: str, area: SearchArea, changes: Iterable[ResourceChange]
) -> Mapping[str, str]:
    """Return Terraform address -> import id of all resources that ``changes`` create although they
    exist, and that are this cluster's.

    Raise a CloudError if Google can't be searched, but for a disabled API.
    """
    created = [
        (change.address, place, change.after)
        for change in changes
        if change.action == "create" and change.after and (place := _PLACES.get(change.type))
    ]
    if not created:
        return {}
    api.reporter.progress("searching Google for what an earlier run has created")
    kinds = {place.kind for _, place, _ in created}
    try:
        found = {
            path: row for _, path, row in find_labelled(api, ID_LABEL, cluster_id, kinds, area)
        }
    except ApiOffError:
        # An API that was just enabled. Terraform tells it, too.
        return {}
    ids = {}
    for address, place, after in created:
        row = found.get(place.path.format_map(after))
        is_there = row is not None and (
            not place.part or any(part["name"] == after["name"] for part in row.get(place.part, ()))
        )
        if is_there:
            ids[address] = (place.id or place.path).format_map(after)
    return ids
