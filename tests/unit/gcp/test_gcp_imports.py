"""What a plan would create and exists already is imported, if it is this cluster's."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.imports import import_ids
from clusterctl.providers.gcp.orphans import ANYWHERE, SearchArea
from clusterctl.providers.gcp.terraform import Action, ResourceChange
from tests.support.google.api import PROJECT, Google
from tests.unit.gcp.module import description, labels

ID = "a1b2c3"
IN_ZONE = {"project": PROJECT, "zone": "us-central1-a"}
IN_REGION = {"project": PROJECT, "region": "us-central1"}
NOWHERE = {"project": PROJECT}
ZONE = f"projects/{PROJECT}/zones/us-central1-a"
REGION = f"projects/{PROJECT}/regions/us-central1"
ACCOUNT = f"demo-a1b2c3-c@{PROJECT}.iam.gserviceaccount.com"
# Terraform type -> attributes of the plan, id in the double's cloud, import id.
RESOURCES: dict[str, tuple[dict[str, Any], str, str]] = {
    kind: (place | attributes, path, identity or path)
    for kind, place, attributes, path, identity in (
        (
            "google_compute_instance",
            IN_ZONE,
            {"name": "demo-ctl"},
            f"{ZONE}/instances/demo-ctl",
            "",
        ),
        (
            "google_compute_network",
            NOWHERE,
            {"name": "n"},
            f"projects/{PROJECT}/global/networks/n",
            "",
        ),
        ("google_compute_subnetwork", IN_REGION, {"name": "s"}, f"{REGION}/subnetworks/s", ""),
        (
            "google_compute_firewall",
            NOWHERE,
            {"name": "f"},
            f"projects/{PROJECT}/global/firewalls/f",
            "",
        ),
        ("google_compute_router", IN_REGION, {"name": "r"}, f"{REGION}/routers/r", ""),
        (
            "google_compute_resource_policy",
            IN_REGION,
            {"name": "p"},
            f"{REGION}/resourcePolicies/p",
            "",
        ),
        (
            "google_filestore_instance",
            NOWHERE,
            {"name": "h", "location": "us-central1-a"},
            f"projects/{PROJECT}/locations/us-central1-a/instances/h",
            "",
        ),
        (
            "google_service_account",
            NOWHERE,
            {"account_id": "demo-a1b2c3-c", "email": ACCOUNT},
            f"projects/{PROJECT}/serviceAccounts/{ACCOUNT}",
            "",
        ),
        (
            "google_storage_bucket",
            NOWHERE,
            {"name": "demo-data"},
            "demo-data",
            f"{PROJECT}/demo-data",
        ),
    )
}


def put(google: Google, kind: str, cluster_id: str) -> None:
    attributes, path, _ = RESOURCES[kind]
    mark = {"labels": labels("demo", cluster_id), "description": description("demo", cluster_id)}
    shares = {"file_shares": [{"capacity_gb": 1024}]}
    google.world.put(
        kind, path, **{**attributes, "name": path.rpartition("/")[2]}, **mark, **shares
    )


def change(kind: str, attributes: dict[str, Any], action: Action = "create") -> ResourceChange:
    return ResourceChange(f"a.{kind}", kind, None, action, None, attributes)


CHANGES = [change(kind, attributes) for kind, (attributes, _, _) in RESOURCES.items()]


def test_import_ids_of_existing_resources(google: Google, api: Api) -> None:
    for kind in RESOURCES:
        put(google, kind, ID)
    expected = {f"a.{kind}": identity for kind, (_, _, identity) in RESOURCES.items()}
    assert import_ids(api, ID, ANYWHERE, CHANGES) == expected


def test_resources_of_other_owners_are_never_imported(google: Google, api: Api) -> None:
    for kind in RESOURCES:
        put(google, kind, "ffffff")
    assert import_ids(api, ID, ANYWHERE, CHANGES) == {}


def test_nat_of_the_clusters_router_is_imported(google: Google, api: Api) -> None:
    kind = "google_compute_router_nat"
    planned = [change(kind, IN_REGION | {"name": "out", "router": "r"})]
    put(google, "google_compute_router", ID)
    assert import_ids(api, ID, ANYWHERE, planned) == {}
    google.world.put(kind, f"{PROJECT}/us-central1/r/out", router="r", **IN_REGION)
    assert import_ids(api, ID, ANYWHERE, planned) == {f"a.{kind}": f"{REGION}/routers/r/out"}


@pytest.mark.parametrize("action", ["update", "delete", "no-op"])
def test_only_created_kinds_are_searched(google: Google, api: Api, action: Action) -> None:
    kind = "google_compute_instance"
    attributes = RESOURCES[kind][0]
    assert import_ids(api, ID, ANYWHERE, [change(kind, attributes, action)]) == {}
    assert google.calls == []
    assert import_ids(api, ID, ANYWHERE, [change(kind, attributes)]) == {}
    assert {method for method, _ in google.calls} == {"compute.instances.aggregatedList"}


def test_firewall_rules_of_a_shared_vpc_are_in_its_host_project(google: Google, api: Api) -> None:
    kind = "google_compute_firewall"
    path = "projects/net-project/global/firewalls/f"
    mark = description("demo", ID)
    google.world.put(kind, path, project="net-project", description=mark)
    planned = [change(kind, {"project": "net-project", "name": "f"})]
    assert import_ids(api, ID, SearchArea(host_project="net-project"), planned) == {
        f"a.{kind}": path
    }
