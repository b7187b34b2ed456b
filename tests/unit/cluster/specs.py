"""Specs for tests of changed clusters."""

from __future__ import annotations

from typing import Any

from clusterctl.spec.models import ClusterSpec

TRAIN = {"name": "train", "nodes": 1}


def spec_of(*partitions: dict[str, Any], **more: Any) -> ClusterSpec:
    """Return the spec of a cluster `d` with these partitions, or of `TRAIN`; ``more`` are its other
    keys.
    """
    fixed = {"version": 1, "name": "d", "partitions": partitions or (TRAIN,)}
    return ClusterSpec.model_validate({**fixed, **more})
