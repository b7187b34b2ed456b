"""A project of the stand-in cloud: quotas, permissions, policies, machine types, images.

    google.project.quotas["NVIDIA_L4_GPUS"] = (0, 0)            # its limit, and what is used
    google.project.quotas["PREEMPTIBLE_CPUS"] = None            # Google does not list it
    google.project.denied.add("iap.tunnelInstances.accessViaIAP")
    google.project.denied.add("net-host:compute.firewalls.create")   # on another project
    google.project.retired.add("compute.subnetworks.use")       # Google does not know it any more
    google.project.enforced.add("compute.requireOsLogin")
    google.project.lists["compute.trustedImageProjects"] = {"allowedValues": ["projects/debian-cloud"]}
    google.project.metadata["enable-oslogin"] = "TRUE"
    google.project.has["zones/us-central1-a/machineTypes/g2-standard-4"] = None  # it is missing

By default, the project allows everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.google.answers import RefusedError
from tests.support.google.refusals import NUMBER

# Source: github.com/terraform-google-modules/terraform-google-org-policy/issues/183 (2026-04).
_MANAGED = (
    "{} is in a Managed constraint format. Managed constraints are only supported with Org "
    "Policy V2 API. Please use Org Policy V2 API or `gcloud org-policies` command instead."
)
# List constraints, whose policy is to allow everything if nobody sets it. Source:
# cloud.google.com/resource-manager/docs/organization-policy/org-policy-constraints.
LISTS = frozenset(
    {
        "compute.requireVpcFlowLogs",
        "compute.restrictCloudNATUsage",
        "compute.restrictSharedVpcSubnetworks",
        "compute.restrictNonConfidentialComputing",
        "compute.restrictVpcPeering",
        "compute.trustedImageProjects",
        "gcp.resourceLocations",
        "gcp.restrictNonCmekServices",
        "gcp.restrictServiceUsage",
    }
)
FOLDER = "246810121416"
ORGANIZATION = "987654321098"
PLENTY = (100_000.0, 0.0)
_EVERYWHERE = ("CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS", "NETWORKS", "ROUTERS", "SUBNETWORKS")
_REGIONAL = (
    *(
        "A2_CPUS",
        "C2_CPUS",
        "CPUS",
        "DISKS_TOTAL_GB",
        "HDB_TOTAL_GB",
        "INSTANCES",
        "LOCAL_SSD_TOTAL_GB",
    ),
    "PREEMPTIBLE_CPUS",
    *(
        "N2_CPUS",
        "NVIDIA_A100_GPUS",
        "NVIDIA_L4_GPUS",
        "NVIDIA_T4_GPUS",
        "PREEMPTIBLE_LOCAL_SSD_GB",
    ),
    *("PREEMPTIBLE_NVIDIA_L4_GPUS", "SSD_TOTAL_GB"),
)
_FOUND: dict[str, dict[str, Any]] = {
    "compute.zones.get": {"status": "UP"},
    "compute.machineTypes.get": {},
    "compute.acceleratorTypes.get": {"maximumCardsPerInstance": 8},
    "compute.images.get": {"status": "READY", "diskSizeGb": "20", "architecture": "X86_64"},
    "compute.images.getFromFamily": {
        "status": "READY",
        "diskSizeGb": "20",
        "architecture": "X86_64",
    },
    "compute.reservations.get": {"status": "READY", "specificReservationRequired": True},
    "compute.reservationBlocks.get": {"resource": {"status": "READY"}},
    "compute.reservationSubBlocks.get": {"resource": {"status": "READY"}},
    "storage.buckets.get": {},
}


# What Google says of some machine types: processors, memory in MB, GPUs and their number, local
# SSDs. Source: GoogleCloudPlatform/cluster-autoscaler at 7d250507 (2026-08-21),
# deprecated_machine_types_config.go of pkg/cloudprovider/gke/machinetypes; the names of the fields:
# Google's discovery document compute.v1 of 2026-11-06.
_MACHINES: dict[str, tuple[int, int, tuple[str, int] | None, int]] = {
    "e2-standard-4": (4, 16384, None, 0),
    "n1-standard-4": (4, 15360, None, 0),
    "g2-standard-4": (4, 16384, ("nvidia-l4", 1), 0),
    "a2-highgpu-1g": (12, 87040, ("nvidia-tesla-a100", 1), 0),
    "a3-highgpu-8g": (208, 1916928, ("nvidia-h100-80gb", 8), 16),
    "c4-standard-8": (8, 30720, None, 0),
    "c4-standard-8-lssd": (8, 30720, None, 1),
    "h4d-standard-192": (192, 737280, None, 0),
    "g4-standard-12": (12, 46080, ("nvidia-rtx-pro-6000", 1), 0),
}


def _machine_type(name: str) -> dict[str, Any]:
    if name not in _MACHINES:
        return {}
    vcpus, memory, gpu, ssds = _MACHINES[name]
    fields: dict[str, Any] = {"guestCpus": vcpus, "memoryMb": memory}
    if gpu:
        fields["accelerators"] = [{"guestAcceleratorType": gpu[0], "guestAcceleratorCount": gpu[1]}]
    return fields | ({"bundledLocalSsds": {"partitionCount": ssds}} if ssds else {})


@dataclass
class Project:
    """``has``: path below the project -> what is special of it, or None."""

    quotas: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    enforced: set[str] = field(default_factory=set)
    lists: dict[str, dict[str, Any]] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    metadata: dict[str, str] = field(default_factory=dict)
    has: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    has_parent: bool = True

    def answer(self, method: str, path: str, body: Any) -> Any:
        """What a call gets; NotImplemented if it is not about the project.

        Raises:
            RefusedError: there is no such thing, or a managed constraint is asked for by the old
                API.
        """
        name = path.rpartition("/")[2]
        match method:
            case "cloudresourcemanager.projects.get":
                parent = {"parent": {"type": "folder", "id": FOLDER}} if self.has_parent else {}
                return {
                    "projectId": name,
                    "projectNumber": NUMBER,
                    "lifecycleState": "ACTIVE",
                } | parent
            case "cloudresourcemanager.projects.testIamPermissions":
                if unknown := self.retired & set(body["permissions"]):
                    # It answers only for permissions that a role on a project can have. Source:
                    # cloud.google.com/resource-manager/reference/rest/v1/projects/testIamPermissions.
                    message = f"Permission {min(unknown)} is not valid for this resource."
                    raise RefusedError(400, message, "badRequest")
                return self._granted(name.partition(":")[0], body["permissions"])
            case "compute.subnetworks.testIamPermissions":
                return self._granted(path.split("/")[4], body["permissions"])
            case "cloudresourcemanager.projects.getAncestry":
                return {"ancestor": self._ancestry(name.partition(":")[0])}
            case "cloudresourcemanager.projects.getEffectiveOrgPolicy":
                return self._policy(body["constraint"])
            case "orgpolicy.projects.policies.getEffectivePolicy":
                constraint = name.partition(":")[0]
                rules: list[dict[str, Any]] = (
                    [{"enforce": True}] if constraint in self.enforced else []
                )
                rules += [
                    {"enforce": True, "condition": {"expression": "resource.hasTagKey('1/a')"}}
                ]
                return {
                    "name": f"projects/{NUMBER}/policies/{constraint}",
                    "spec": {"rules": rules},
                }
            case "compute.projects.get":
                fields = self._common()
            case "compute.regions.get":
                fields = {"quotas": self._quotas(_REGIONAL)}
            case _ if method in _FOUND:
                special = next((one for end, one in self.has.items() if path.endswith(end)), {})
                if special is None:
                    raise RefusedError(404, f"The resource '{path}' was not found", "notFound")
                of_type = _machine_type(name) if method == "compute.machineTypes.get" else {}
                fields = _FOUND[method] | of_type | special
            case _:
                return NotImplemented
        return (
            {"resource": {"name": name} | fields["resource"]}
            if "resource" in fields
            else {"name": name} | fields
        )

    def _granted(self, project: str, permissions: Iterable[str]) -> dict[str, Any]:
        denied = {*self.denied, *(one.removeprefix(f"{project}:") for one in self.denied)}
        return {"permissions": [one for one in permissions if one not in denied]}

    def _policy(self, name: str) -> Any:
        constraint = name.removeprefix("constraints/")
        if constraint in self.retired:
            raise RefusedError(404, "Requested entity was not found.", "notFound")
        if ".managed." in constraint:
            raise RefusedError(400, _MANAGED.format(name), "badRequest")
        fields: dict[str, Any] = {"constraint": name}
        if constraint in self.enforced:
            fields["booleanPolicy"] = {"enforced": True}
        if constraint in LISTS:
            fields["listPolicy"] = self.lists.get(constraint, {"allValues": "ALLOW"})
        return fields

    def _ancestry(self, project: str) -> list[dict[str, Any]]:
        ancestors = [("folder", FOLDER), ("organization", ORGANIZATION)] if self.has_parent else []
        return [
            {"resourceId": {"type": kind, "id": number}}
            for kind, number in (("project", project), *ancestors)
        ]

    def _common(self) -> dict[str, Any]:
        items = [{"key": key, "value": value} for key, value in self.metadata.items()]
        common = {"kind": "compute#metadata"} | ({"items": items} if items else {})
        return {"quotas": self._quotas(_EVERYWHERE), "commonInstanceMetadata": common}

    def _quotas(self, metrics: Iterable[str]) -> list[dict[str, Any]]:
        listed = ((metric, self.quotas.get(metric, PLENTY)) for metric in metrics)
        return [
            {"metric": metric, "limit": quota[0], "usage": quota[1]}
            for metric, quota in listed
            if quota
        ]
