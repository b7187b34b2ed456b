"""Role variables that only machines of the user's own have: what runs there already is respected."""

from __future__ import annotations

from typing import Any

from clusterctl.inventory import Inventory
from clusterctl.spec import ClusterSpec, OnpremProvider


def own_machine_variables(spec: ClusterSpec, inventory: Inventory) -> dict[str, Any]:
    """The variables of the roles time, tuning, firewall and selinux; none elsewhere."""
    if not isinstance(spec.provider, OnpremProvider):
        return {}
    kind = inventory.shared_folder.kind
    homes_are = {"nfs": "exported", "none": "apart"}.get(kind, "mounted")
    return {
        "clusterctl_keeps": True,
        "job_env_looks_at_fabric": True,
        "time_controller": inventory.controller.address,
        "time_network": inventory.network,
        "firewall_addresses": [host.address for host in inventory.hosts],
        "firewall_network": inventory.network,
        "firewall_exports": kind == "nfs",
        "selinux_homes": f"{inventory.shared}/home",
        "selinux_homes_are": homes_are,
    }
