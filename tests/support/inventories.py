"""Inventories of clusters without machines, also with GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clusterctl.scheduler.session import Session, site_of
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory, PartitionFacts

KEY = "ssh-ed25519 AAAA"


def host_of(name: str, role: str = COMPUTE, **more: Any) -> Host:
    return Host(**{"name": name, "address": "10.0.0.3", "roles": (role,), "host_key": KEY, **more})


def inventory_of(*nodes: str | Host, **more: Any) -> Inventory:
    """Return the inventory of a cluster `d` of its controller and these nodes.

    ``more`` changes its fields: ``hosts`` takes the place of all hosts, the controller among them.
    """
    hosts = (host_of(name) if isinstance(name, str) else name for name in nodes)
    controller = host_of("d-ctl", CONTROLLER, address="10.0.0.2")
    fixed = {"cluster": "d", "cluster_id": "a1b2c3", "provider": "local", "network": "10.0.0.0/24"}
    return Inventory(
        **{**fixed, "hosts": (controller, *hosts), "shared": "/shared", "baked": True, **more}
    )


CTL = "head"
ONE = "gpu01"
TWO = "gpu02"
INVENTORY = inventory_of(
    provider="onprem",
    hosts=(
        host_of(CTL, CONTROLLER, address="10.0.0.2"),
        host_of(ONE, partition="train"),
        host_of(TWO, partition="train", address="10.0.0.4"),
    ),
    baked=False,
)


def inventory_with(*partitions: PartitionFacts, **more: Any) -> Inventory:
    """Return the inventory of a cluster `d` with these partitions; ``more`` changes its fields."""
    nodes = dict.fromkeys(node for partition in partitions for node in partition.nodes)
    return inventory_of(*nodes, **{"job_user": "hpc", "partitions": partitions, **more})


def with_inventory(session: Session, **changes: Any) -> Session:
    """Return the session with another inventory, and so with the site of it."""
    return replace(session, site=site_of(replace(session.inventory, **changes)))
