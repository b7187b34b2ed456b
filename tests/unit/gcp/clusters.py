"""The provider of a spec, and a workspace as `up` creates it, for tests of GcpProvider."""

from __future__ import annotations

from pathlib import Path

from clusterctl.providers.base import Prompts
from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import SILENT, Reporter
from tests.support.google.api import PROJECT
from tests.support.google.cloud import GoogleCloud

# What may outlive a cluster: APIs that others may need, grants to accounts that are gone, a part of
# a router.
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
    world = cloud.store
    at = {"project": PROJECT, "region": "us-central1", "ip_cidr_range": "10.90.0.0/20"}
    world.put(
        "google_compute_network", f"projects/{PROJECT}/global/networks/research", project=PROJECT
    )
    path = f"projects/{PROJECT}/regions/us-central1/subnetworks/research-a"
    world.put("google_compute_subnetwork", path, self_link=path, **at)


def provider_of(spec: ClusterSpec, reporter: Reporter = SILENT) -> GcpProvider:
    assert isinstance(spec.provider, GcpSettings)
    return GcpProvider(spec.provider, Prompts(reporter=reporter))


def workspace_in(folder: Path) -> Workspace:
    """Return the workspace of the cluster `demo`, with its id and keys."""
    found = Workspace(folder / "demo")
    found.create()
    found.create_secrets()
    return found
