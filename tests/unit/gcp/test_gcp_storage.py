"""Shared storage that outlives its cluster on Google Cloud, with the double of Google's API."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.providers.gcp import storage
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.provider import record_applied, variables, write_module
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.models import ClusterSpec
from tests.support.google.api import PROJECT, Google
from tests.support.messages import refused
from tests.unit.gcp.clusters import OWN_NETWORK, provider_of, workspace_in
from tests.unit.gcp.module import CLUSTER_ID, PUBLIC_KEY

DISK = "google_compute_disk"
FILESTORE = "google_filestore_instance"
ON_FILESTORE = {"filestore": {"tier": "BASIC_HDD", "capacity": "1TiB"}}


def spec_of(
    *, keep: bool = True, user: str = "ada", uid: int = 3001, **provider: Any
) -> ClusterSpec:
    settings = {"type": "gcp", "project": PROJECT, "zone": "us-central1-a", "network": OWN_NETWORK}
    settings |= {"enable_apis": False}
    document: dict[str, Any] = {"version": 1, "name": "demo", "provider": settings | provider}
    users = [{"name": user, "uid": uid}, {"name": "bob", "uid": 3002}]
    parts = {
        "partitions": [{"name": "train", "nodes": 1}],
        "storage": {"keep": keep},
        "users": users,
    }
    return ClusterSpec.model_validate(document | parts)


def kept(spec: ClusterSpec) -> tuple[KeptStorage, ...]:
    return provider_of(spec).kept_storage(spec.name, [spec.job_user.name])


def left_disk(google: Google, *, user: str = "ada") -> str:
    """Create the disk that an earlier cluster kept. Return its path."""
    path = f"projects/{PROJECT}/zones/us-central1-a/disks/demo-a1b2c3-shared"
    labels = {"clusterctl-storage": "demo", "clusterctl-user": user, "clusterctl-uid": "3001"}
    disk = {"zone": "us-central1-a", "project": PROJECT, "size": 100, "type": "pd-balanced"}
    google.world.put(DISK, path, labels=labels, **disk)
    return path


def left_filestore(google: Google) -> str:
    path = f"projects/{PROJECT}/locations/us-central1-a/instances/demo-a1b2c3-shared"
    labels = {"clusterctl-storage": "demo", "clusterctl-user": "ada", "clusterctl-uid": "3001"}
    share = {
        "location": "us-central1-a",
        "tier": "BASIC_HDD",
        "file_shares": [{"capacity_gb": 1024}],
    }
    google.world.put(FILESTORE, path, labels=labels, **share)
    return path


@pytest.mark.parametrize(
    ("changed", "code", "values"),
    [
        (
            {"shared_disk": {"size": "50GiB"}},
            "storage-unfit",
            ("of 100GiB", "of 50GiB"),
        ),
        (
            {"shared_disk": {"size": "1TiB", "type": "pd-ssd"}},
            "storage-unfit",
            ("asks for pd-ssd",),
        ),
        ({"zone": "us-central1-b"}, "storage-unfit", ("in us-central1-a; ", "in us-central1-b")),
        (ON_FILESTORE, "storage-unfit", ("pd-balanced of", "asks for BASIC")),
        ({"uid": 2001}, "storage-users-differ", ("ada has uid 2001", "uid 3001 owns")),
    ],
)
def test_kept_storage_that_does_not_fit_the_spec_is_refused_by_plan(
    tmp_path: Path, google: Google, changed: dict[str, Any], code: str, values: tuple[str, ...]
) -> None:
    left_disk(google)
    spec = spec_of(**changed)
    workspace = workspace_in(tmp_path)
    with refused(code, UsageError, *values):
        provider_of(spec).plan(spec, workspace)
    assert not workspace.terraform.exists()


def test_kept_storage_of_another_user_is_ignored(google: Google) -> None:
    path = left_disk(google, user="eve")
    assert kept(spec_of()) == ()
    assert kept(spec_of(user="eve"))[0].id == path


INSTANCES = f"projects/{PROJECT}/zones/us-central1-a/instances"


@pytest.mark.parametrize(
    ("is_disk", "instance", "is_used"),
    [
        (True, {"attached": True}, True),  # by whomever
        (True, {"cluster": "demo"}, False),  # a colleague's, or one without `keep: true`
        (False, {"cluster": "demo", "desired_status": "TERMINATED"}, True),
        (False, {"cluster": "other"}, False),
    ],
)
def test_storage_used_by_an_instance_is_not_removed(
    google: Google, is_disk: bool, instance: dict[str, Any], is_used: bool
) -> None:
    path = left_disk(google) if is_disk else left_filestore(google)
    attached = [{"source": path}] if instance.pop("attached", False) else []
    has = {
        "labels": {"clusterctl-cluster": instance.pop("cluster", "x")},
        "attached_disk": attached,
    }
    at = {"zone": "us-central1-a", "project": PROJECT}
    google.world.put("google_compute_instance", f"{INSTANCES}/one", **has, **at, **instance)
    (one,), provider = kept(spec_of()), provider_of(spec_of())
    if is_used:
        for step in (provider.refuse_used, provider.remove_storage):
            with refused("storage-in-use", UsageError, "'demo'", "instance one"):
                step(one)
    else:
        provider.refuse_used(one)
        provider.remove_storage(one)
    assert bool(kept(spec_of())) == is_used


@pytest.mark.parametrize(
    ("place", "zone", "is_used"),
    [
        ("europe-west1", "europe-west1-b", True),  # a regional one
        ("europe-west1", "europe-west10-a", False),
        ("europe-west1-b", "europe-west1-c", False),
    ],
)
def test_filestore_is_used_from_its_zone_or_region(
    google: Google, api: Api, place: str, zone: str, is_used: bool
) -> None:
    path = f"projects/{PROJECT}/zones/{zone}/instances/one"
    at = {"zone": zone, "project": PROJECT}
    google.world.put("google_compute_instance", path, labels={"clusterctl-cluster": "demo"}, **at)
    share = KeptStorage(
        cluster="demo", id=f"projects/{PROJECT}/locations/{place}/instances/s", what="share"
    )
    with refused("storage-in-use", UsageError) if is_used else nullcontext():
        storage.reject_in_use(api, share)


@pytest.mark.parametrize("keep", [True, False])
def test_storage_keep_can_not_change_while_up(google: Google, tmp_path: Path, keep: bool) -> None:
    workspace = workspace_in(tmp_path)
    spec = spec_of(keep=keep)
    other = spec_of(keep=not keep)
    write_module(workspace.terraform, variables(spec, CLUSTER_ID, PUBLIC_KEY), None, cluster="demo")
    record_applied(workspace.terraform)
    with refused("storage-keep-changed", UsageError, f"set `keep: {str(keep).lower()}`"):
        provider_of(other).plan(other, workspace)
