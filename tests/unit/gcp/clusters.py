"""What tests of GcpProvider share: the provider of a spec, and a workspace as `up` begins it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.google.terraformed import CLUSTER_ID, PLACE, Terraformed
from tests.support.google.world import World
from tests.unit.gcp.carry import removing

# What may outlive a cluster: APIs that others may need, grants to accounts that are gone, a part of a router.
NOT_BILLED = {
    "google_project_service",
    "google_project_iam_member",
    "google_storage_bucket_iam_member",
    "google_compute_router_nat",
}
# More settings for ``Terraformed``: half as many resources.
LEAN = "network: {network: research, subnetwork: research-a}, enable_apis: false"
OWN_NETWORK = {"network": "research", "subnetwork": "research-a"}


def put_own_network(cloud: GoogleCloud) -> None:
    """Have ``OWN_NETWORK``, which is no cluster's, in the cloud."""
    world = World(cloud.store.path)
    at = {"project": PROJECT, "region": "us-central1", "ip_cidr_range": "10.90.0.0/20"}
    world.put("google_compute_network", f"projects/{PROJECT}/global/networks/research", **at)
    path = f"projects/{PROJECT}/regions/us-central1/subnetworks/research-a"
    world.put("google_compute_subnetwork", path, self_link=path, **at)


def provider_of(spec: ClusterSpec) -> GcpProvider:
    assert isinstance(spec.provider, GcpSettings)
    return GcpProvider(spec.provider)


def silent(*_: object) -> None:
    """Nobody hears of progress."""


def workspace_in(folder: Path) -> Workspace:
    """That of the cluster `demo`, with its id and its keys, in a folder of workspaces."""
    found = Workspace(folder / "demo")
    found.create()
    found.create_secrets()
    return found


@contextmanager
def google_of(cluster: Terraformed) -> Iterator[Google]:
    """Google's API, which shows the cluster's resources; clusterctl talks to it."""
    with (
        Google(World(cluster.cloud.store.path), PLACE.project) as google,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in google.environment.items():
            patch.setenv(name, value)
        yield google
        assert not google.violations


def remove(cluster: Terraformed) -> None:
    """`down`: what the state knows, then what only Google's API shows, as ``GcpProvider.destroy`` has it."""
    found = removing(Api(PLACE.project, clock=Clock(sleep=lambda _: None)), CLUSTER_ID, cluster.said.append)
    cluster.down(found)
    found()


def removed(cluster: Terraformed) -> None:
    """It is removed, and nothing is left that is billed."""
    with google_of(cluster):
        remove(cluster)
    assert set(cluster.cloud.resources().values()) <= NOT_BILLED
