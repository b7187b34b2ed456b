"""Role variables that only machines of the user's own have: what runs there already is respected."""

from __future__ import annotations

from typing import Any

from clusterctl.inventory import Inventory
from clusterctl.spec import ClusterSpec, OnpremProvider


def own_machine_variables(spec: ClusterSpec, inventory: Inventory) -> dict[str, Any]:
    """The variables of the roles time, tuning, firewall and selinux; none elsewhere."""
    if not isinstance(spec.provider, OnpremProvider):
        return {}
    by_nfs = inventory.shared_folder.kind == "nfs"
    return {
        "clusterctl_keeps": True,
        "time_controller": inventory.controller.address,
        "time_network": inventory.network,
        "firewall_addresses": [host.address for host in inventory.hosts],
        "firewall_network": inventory.network,
        "firewall_exports": by_nfs,
        "selinux_homes": f"{inventory.shared}/home",
        "selinux_nfs_homes": by_nfs,
    }
