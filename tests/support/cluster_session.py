"""A session as the command line makes it, for phases that are run alone."""

from __future__ import annotations

from typing import Any

from clusterctl.cluster.session import ClusterSession, provider_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace


def session_of(spec: ClusterSpec, workspace: Workspace, provider: Any = None) -> ClusterSession:
    """A session that reports to nobody; ``provider`` stands in for the spec's."""
    return ClusterSession(spec=spec, workspace=workspace, provider=provider or provider_of(spec.provider))
