"""Role variables of whole machines: what guards them lets the cluster through, what is somebody's is kept."""

from __future__ import annotations

from typing import Any

from clusterctl.spec import ClusterSpec, GcpProvider, OnpremProvider
from clusterctl.spec.onprem import is_this_machine
from clusterctl.state.inventory import Inventory


def own_machine_variables(spec: ClusterSpec, inventory: Inventory) -> dict[str, Any]:
    """The variables of the roles time, tuning, firewall and selinux, where the provider has use for them."""
    if isinstance(spec.provider, GcpProvider):
        return _guarded(inventory)
    if not isinstance(spec.provider, OnpremProvider):
        return {}
    return {
        "clusterctl_keeps": True,  # they are given back as they were: what they are is noted first
        "job_env_looks_at_fabric": True,
        "time_controller": inventory.controller.address,
        "time_network": inventory.network,
        "firewall_serves_time": True,
        **_guarded(inventory),
    }


def _guarded(inventory: Inventory) -> dict[str, Any]:
    """What SELinux and a firewall that are in force there must know of the cluster."""
    kind = inventory.shared_folder.kind
    homes_are = {"nfs": "exported", "none": "apart"}.get(kind, "mounted")
    return {
        "clusterctl_guarded": True,
        # What a machine says to itself, no firewall keeps from it.
        "firewall_addresses": [h.address for h in inventory.hosts if not is_this_machine(h.address)],
        "firewall_exports": kind == "nfs",
        "selinux_homes": f"{inventory.shared}/home",
        "selinux_homes_are": homes_are,
    }
