"""Storage that outlives clusters on Google Cloud, with the double of Google's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.providers.gcp import storage
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.models import ClusterSpec
from tests.support.google.api import PROJECT, Google
from tests.support.messages import refused
from tests.unit.gcp.clusters import OWN_NETWORK, provider_of, workspace_in

DISK = "google_compute_disk"
FILESTORE = "google_filestore_instance"
ON_FILESTORE = {"filestore": {"tier": "BASIC_HDD", "capacity": "1TiB"}}
LABELS = {"clusterctl-storage": "data", "clusterctl-user": "ada", "clusterctl-uid": "3001"}
DISK_PATH = f"projects/{PROJECT}/zones/us-central1-a/disks/data"
INSTANCES = f"projects/{PROJECT}/zones/us-central1-a/instances"


def spec_of(*, name: str | None = "data", uid: int = 3001, **provider: Any) -> ClusterSpec:
    settings = {"type": "gcp", "project": PROJECT, "zone": "us-central1-a", "network": OWN_NETWORK}
    settings |= {"enable_apis": False}
    document: dict[str, Any] = {"version": 1, "name": "demo", "provider": settings | provider}
    parts = {
        "partitions": [{"name": "train", "nodes": 1}],
        "storage": {"name": name},
        "users": [{"name": "ada", "uid": uid}, {"name": "bob", "uid": 3002}],
    }
    return ClusterSpec.model_validate(document | parts)


def storages() -> tuple[KeptStorage, ...]:
    return provider_of(spec_of()).storages()


def put_disk(google: Google, labels: dict[str, str] = LABELS) -> None:
    disk = {"zone": "us-central1-a", "project": PROJECT, "size": 100, "type": "pd-balanced"}
    google.world.put(DISK, DISK_PATH, labels=labels, **disk)


def put_filestore(google: Google, **more: Any) -> None:
    path = f"projects/{PROJECT}/locations/us-central1-a/instances/data"
    share = {
        "location": "us-central1-a",
        "tier": "BASIC_HDD",
        "file_shares": [{"capacity_gb": 1024, "name": "shared"}],
    }
    google.world.put(FILESTORE, path, labels=LABELS, **share, **more)


@pytest.mark.parametrize(
    ("changed", "code", "values"),
    [
        ({"zone": "us-central1-b"}, "option-invalid/storage", ("us-central1-a", "us-central1-b")),
        ({"uid": 2001}, "option-invalid/storage-users", ("ada has uid 2001", "uid 3001 owns")),
    ],
)
def test_storage_that_does_not_fit_the_spec_is_refused_by_plan(
    tmp_path: Path, google: Google, changed: dict[str, Any], code: str, values: tuple[str, ...]
) -> None:
    put_disk(google)
    spec = spec_of(**changed)
    workspace = workspace_in(tmp_path)
    with refused(code, UsageError, *values):
        provider_of(spec).plan(spec, workspace)
    assert not workspace.terraform.exists()


@pytest.mark.parametrize(
    ("is_disk", "instance", "is_used"),
    [
        (True, {"attached": True}, True),  # by whomever
        (True, {"uses": "data"}, True),
        (False, {"uses": "data", "desired_status": "TERMINATED"}, True),
        (False, {"uses": "other"}, False),
    ],
)
def test_storage_used_by_an_instance_is_not_removed(
    tmp_path: Path, google: Google, *, is_disk: bool, instance: dict[str, Any], is_used: bool
) -> None:
    put_disk(google) if is_disk else put_filestore(google)
    has = {
        "labels": {"clusterctl-uses-storage": instance.get("uses", "x")},
        "attached_disk": [{"source": DISK_PATH}] if instance.get("attached") else [],
        "desired_status": instance.get("desired_status", "RUNNING"),
    }
    at = {"zone": "us-central1-a", "project": PROJECT}
    google.world.put("google_compute_instance", f"{INSTANCES}/one", **has, **at)
    (one,), provider = storages(), provider_of(spec_of())
    if is_used:
        assert one.used_by == ("one",)
        with refused("in-use/storage", UsageError, "used by one"):
            provider.remove_storage(one)
        with refused("in-use/storage", UsageError):  # of another cluster
            provider.plan(spec_of(), workspace_in(tmp_path))
    else:
        provider.remove_storage(one)
    assert bool(storages()) == is_used


def put_host(
    google: Google, name: str, *, cluster_id: str, zone: str = "us-central1-a", **more: Any
) -> None:
    labels = {"clusterctl-uses-storage": "data", "clusterctl-id": cluster_id}
    path = f"projects/{PROJECT}/zones/{zone}/instances/{name}"
    row = {"zone": zone, "project": PROJECT, "desired_status": "RUNNING"} | more
    google.world.put("google_compute_instance", path, labels=labels, **row)


def test_hosts_use_a_storage_for_their_cluster(google: Google) -> None:
    """Whatever the spec calls them now: nodes that leave, and the machine of an image."""
    put_filestore(google)
    for name in ("demo-train-1", "demo-train-9", "demo-image"):
        put_host(google, name, cluster_id="aaaaaa")
    (one,) = storages()
    one.reject_use("aaaaaa")
    # Another cluster has hosts of the same names in another zone.
    put_host(google, "demo-train-1", cluster_id="bbbbbb", zone="us-central1-b")
    (one,) = storages()
    with refused("in-use/storage", UsageError, "used by demo-train-1"):
        one.reject_use("aaaaaa")


def test_disk_that_a_host_of_the_cluster_has_is_not_a_strangers(google: Google) -> None:
    put_disk(google)
    attached = [{"source": DISK_PATH}]
    put_host(google, "demo-ctl", cluster_id="aaaaaa", attached_disk=attached)
    (one,) = storages()
    assert one.used_by == ("demo-ctl",)
    one.reject_use("aaaaaa")


def test_storage_of_a_colleague_is_told_from_ones_own(google: Google) -> None:
    """A folder alone is no proof: a creation that failed leaves it, too."""
    variables = storage.own_variables(spec_of())
    put_disk(google, variables["labels"])
    folder = storage.folder(PROJECT, "data")
    folder.mkdir(parents=True)
    other = storage.own_variables(spec_of())
    (folder / storage.VARIABLES).write_text(json.dumps(other))
    (one,) = storages()
    assert not one.is_from_here
    (folder / storage.VARIABLES).write_text(json.dumps(variables))
    (one,) = storages()
    assert one.is_from_here


def test_storage_that_a_cluster_used_since_it_was_shown_is_not_removed(google: Google) -> None:
    put_filestore(google)
    (shown,) = storages()
    put_host(google, "demo-ctl", cluster_id="aaaaaa")
    with refused("in-use/storage", UsageError):
        provider_of(spec_of()).remove_storage(shown)
    assert storages()


def test_cluster_gets_the_address_of_a_filestore_instance(google: Google, api: Api) -> None:
    spec = spec_of(**ON_FILESTORE)
    placeholder = storage.variable(api, spec, None)
    assert placeholder is not None
    assert placeholder["filestore"]["server"] is None
    put_filestore(google)
    (one,) = storages()
    with refused("cloud-refused/storage-not-ready", ProvisionError):
        storage.variable(api, spec, one)
    put_filestore(google, networks=[{"ip_addresses": ["10.3.0.34"]}])
    assert storage.variable(api, spec, one) == {
        "name": "data",
        "filestore": {"server": "10.3.0.34", "path": "/shared", "range": "10.3.0.32/29"},
    }


def test_spec_without_a_storage_has_no_variable(api: Api) -> None:
    assert storage.variable(api, spec_of(name=None), None) is None
