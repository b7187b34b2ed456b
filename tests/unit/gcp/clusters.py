"""What tests of GcpProvider share: the provider of a spec, and a workspace as `up` begins it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.orphans import find_resources, remove_resources
from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.google.api import Google
from tests.support.google.terraformed import CLUSTER_ID, PLACE, Terraformed
from tests.support.google.world import World

# What may outlive a cluster: APIs that others may need, grants to accounts that are gone, a part of a router.
NOT_BILLED = {
    "google_project_service",
    "google_project_iam_member",
    "google_storage_bucket_iam_member",
    "google_compute_router_nat",
}


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


def removed(cluster: Terraformed) -> None:
    """`down`: what the state knows, then what only Google's API shows, as ``GcpProvider.destroy`` has it."""
    with (
        Google(World(cluster.cloud.store.path), PLACE.project) as google,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in google.environment.items():
            patch.setenv(name, value)
        api = Api(PLACE.project, clock=Clock(sleep=lambda _: None))

        def remove() -> None:
            remove_resources(api, find_resources(api, CLUSTER_ID), report=cluster.said.append)

        cluster.down(remove)
        remove()
        assert not google.violations
    assert set(cluster.cloud.resources().values()) <= NOT_BILLED
