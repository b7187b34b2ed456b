"""Hosts and inventories of tests: a test names what matters to it."""

from __future__ import annotations

from typing import Any

from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory

KEY = "ssh-ed25519 AAAA"


def a_host(name: str, address: str, role: str = COMPUTE, **differs: Any) -> Host:
    return Host.model_validate(
        {"name": name, "address": address, "roles": (role,), "host_key": KEY, **differs}
    )


def controller(name: str, address: str, **differs: Any) -> Host:
    return a_host(name, address, CONTROLLER, **differs)


def an_inventory(*hosts: Host, **differs: Any) -> Inventory:
    """Of a local cluster whose nodes have an image."""
    named = {"cluster": "demo", "cluster_id": "abc123", "provider": "local", "baked": True}
    place = {"network": "10.1.2.0/24", "shared": "/shared"}
    return Inventory.model_validate({**named, **place, "hosts": hosts, **differs})
