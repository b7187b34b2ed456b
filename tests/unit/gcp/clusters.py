"""What tests of GcpProvider share: the provider of a spec, and a workspace as `up` begins it."""

from __future__ import annotations

from pathlib import Path

from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace


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
