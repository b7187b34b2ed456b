"""What the helper has recorded of a cluster: a test names what matters to it."""

from __future__ import annotations

from typing import Any

from clusterctl.providers.local.layout import ClusterState


def a_state(cluster_id: str = "a1b2c3", **differs: Any) -> ClusterState:
    place = {"owner": 0, "workspace": "/w", "image": "0" * 16, "subnet": "10.9.8.0/24"}
    return ClusterState.model_validate({"id": cluster_id, "name": "d", **place, **differs})
