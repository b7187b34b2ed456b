"""What a node costs an hour, whoever makes it."""

from __future__ import annotations

from clusterctl.providers.gcp import costs as google
from clusterctl.spec.models import ClusterSpec


def node_price(spec: ClusterSpec, partition: str) -> float | None:
    """A node of that partition with its disks, in USD an hour; None where it is not known.

    The partition's `price_per_hour` comes before what a cloud asks for.
    """
    found = next((p for p in spec.partitions if p.name == partition), None)
    if found is None or found.price_per_hour is not None:
        return found.price_per_hour if found else None
    return google.node_price(spec, found) if spec.provider.type == "gcp" else None
