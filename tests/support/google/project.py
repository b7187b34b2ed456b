"""A project of the stand-in cloud: quotas, machine types, images.

    google.project.quotas["NVIDIA_L4_GPUS"] = (0, 0)            # its limit, and what is used
    google.project.quotas["PREEMPTIBLE_CPUS"] = None            # Google does not list it
    google.project.metadata["enable-oslogin"] = "TRUE"
    google.project.has["zones/us-central1-a/machineTypes/g2-standard-4"] = None  # it is missing

By default, the project has everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.google.answers import RefusedError
from tests.support.google.refusals import NUMBER

PLENTY = (100_000.0, 0.0)
_EVERYWHERE = ("CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS")
_REGIONAL = (
    "A2_CPUS",
    "C2_CPUS",
    "CPUS",
    "PREEMPTIBLE_CPUS",
    "N2_CPUS",
    "NVIDIA_A100_GPUS",
    "NVIDIA_L4_GPUS",
    "NVIDIA_T4_GPUS",
    "PREEMPTIBLE_NVIDIA_L4_GPUS",
)
_FOUND: dict[str, dict[str, Any]] = {
    "compute.machineTypes.get": {},
    "compute.acceleratorTypes.get": {"maximumCardsPerInstance": 8},
    "compute.images.get": {"status": "READY", "diskSizeGb": "20", "architecture": "X86_64"},
    "compute.images.getFromFamily": {
        "status": "READY",
        "diskSizeGb": "20",
        "architecture": "X86_64",
    },
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
    metadata: dict[str, str] = field(default_factory=dict)
    has: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    def answer(self, method: str, path: str) -> Any:
        """What a call gets; NotImplemented if it is not about the project.

        Raise a RefusedError if there is no such thing.
        """
        name = path.rpartition("/")[2]
        match method:
            case "cloudresourcemanager.projects.get":
                return {
                    "projectId": name,
                    "projectNumber": NUMBER,
                    "lifecycleState": "ACTIVE",
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
        return {"name": name} | fields

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
