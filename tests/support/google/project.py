"""What a project of the stand-in has and allows: APIs' quotas, rights, policies, machine types, images.

    google.project.quotas["NVIDIA_L4_GPUS"] = (0, 0)            # its limit, and what is used
    google.project.denied.add("iap.tunnelInstances.accessViaIAP")
    google.project.enforced.add("compute.requireOsLogin")
    google.project.allowed["compute.trustedImageProjects"] = ["projects/debian-cloud"]
    google.project.has["zones/us-central1-a/machineTypes/g2-standard-4"] = None  # it is missing

All else is as in a project where nothing stands in the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.google.provider.faults import NUMBER

PLENTY = (100_000.0, 0.0)
_EVERYWHERE = ("CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS", "NETWORKS", "ROUTERS", "SUBNETWORKS")
_REGIONAL = (
    *("A2_CPUS", "C2_CPUS", "CPUS", "DISKS_TOTAL_GB", "HDB_TOTAL_GB", "INSTANCES", "LOCAL_SSD_TOTAL_GB"),
    *("N2_CPUS", "NVIDIA_A100_GPUS", "NVIDIA_L4_GPUS", "NVIDIA_T4_GPUS", "PREEMPTIBLE_LOCAL_SSD_GB"),
    *("PREEMPTIBLE_NVIDIA_L4_GPUS", "RESOURCE_POLICIES", "SSD_TOTAL_GB"),
)
_FOUND: dict[str, dict[str, Any]] = {
    "compute.zones.get": {"status": "UP"},
    "compute.machineTypes.get": {},
    "compute.acceleratorTypes.get": {"maximumCardsPerInstance": 8},
    "compute.images.get": {"status": "READY", "diskSizeGb": "20", "architecture": "X86_64"},
    "compute.images.getFromFamily": {"status": "READY", "diskSizeGb": "20", "architecture": "X86_64"},
    "compute.reservations.get": {"status": "READY", "specificReservationRequired": True},
    "compute.networks.getEffectiveFirewalls": {"firewalls": [], "firewallPolicys": []},
    "storage.buckets.get": {},
}
_ASKED = {
    "cloudresourcemanager.projects.get": "project",
    "cloudresourcemanager.projects.testIamPermissions": "permissions",
    "cloudresourcemanager.projects.getEffectiveOrgPolicy": "policy",
    "compute.projects.get": "quotas",
    "compute.regions.get": "quotas",
}


@dataclass
class Project:
    """``has``: path below the project -> what is special of it, or None."""

    quotas: dict[str, tuple[float, float]] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    enforced: set[str] = field(default_factory=set)
    allowed: dict[str, list[str]] = field(default_factory=dict)
    has: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    state: str = "ACTIVE"

    def knows(self, method: str) -> bool:
        """Whether a call of this method is about the project."""
        return method in _FOUND or method in _ASKED

    def answer(self, method: str, path: str, body: Any) -> Any:
        """What a call gets; None where there is no such thing."""
        name = path.rpartition("/")[2]
        match _ASKED.get(method):
            case "project":
                return {"projectId": name, "projectNumber": NUMBER, "lifecycleState": self.state}
            case "permissions":
                return {"permissions": [one for one in body["permissions"] if one not in self.denied]}
            case "policy":
                constraint = body["constraint"].removeprefix("constraints/")
                said = {"booleanPolicy": {"enforced": True}} if constraint in self.enforced else {}
                listed = {"allowedValues": self.allowed[constraint]} if constraint in self.allowed else {}
                return {
                    "constraint": body["constraint"],
                    **said,
                    **({"listPolicy": listed} if listed else {}),
                }
            case "quotas":
                known = _EVERYWHERE if method == "compute.projects.get" else _REGIONAL
                return {"name": name, "quotas": [*map(self._quota, known)]}
        special = next((one for end, one in self.has.items() if path.endswith(end)), {})
        named = {} if method.endswith("getEffectiveFirewalls") else {"name": name}
        return None if special is None else named | _FOUND[method] | special

    def _quota(self, metric: str) -> dict[str, Any]:
        limit, usage = self.quotas.get(metric, PLENTY)
        return {"metric": metric, "limit": limit, "usage": usage}
