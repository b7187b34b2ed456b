"""What must hold of everything that the module plans, whatever the spec: its promises of safety."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LONGEST_NAME = 63
IAP = "35.235.240.0/20"
ON_A_PROJECT = frozenset({"roles/logging.logWriter", "roles/monitoring.metricWriter"})
ON_A_THING = frozenset({"roles/compute.instanceAdmin.v1", "roles/storage.objectUser"})
FIXED: Mapping[str, Mapping[str, Any]] = {
    "google_project_service": {"disable_on_destroy": False},
    "google_storage_bucket": {"force_destroy": False, "public_access_prevention": "enforced"},
    "google_compute_router_nat": {"source_subnetwork_ip_ranges_to_nat": "LIST_OF_SUBNETWORKS"},
}
METADATA = {
    "block-project-ssh-keys": "TRUE",
    "enable-guest-attributes": "TRUE",
    "enable-oslogin": "FALSE",
    "serial-port-enable": "FALSE",
}
DESCRIBED = frozenset(
    {
        "google_compute_firewall",
        "google_compute_network",
        "google_compute_resource_policy",
        "google_compute_router",
        "google_service_account",
    }
)
MARKS = {"clusterctl-cluster", "clusterctl-id"}
OF_STORAGE = {"clusterctl-cluster", "clusterctl-storage", "clusterctl-user", "clusterctl-uid"}

Values = Mapping[str, Any]


def findings(resources: Mapping[str, Values], *, kms_key: str | None) -> list[str]:
    """What breaks a promise, as `address: what is wrong`."""
    found = [
        f"{address}: {wrong}" for address, values in resources.items() for wrong in _wrong(address, values)
    ]
    if kms_key:
        found += [f"{address}: not encrypted with {kms_key}" for address in _without_key(resources, kms_key)]
    if not any(".google_compute_firewall.deny" in address for address in resources):
        found.append("firewall: what is not allowed is not denied")
    return found


def _wrong(address: str, values: Values) -> Iterator[str]:
    kind = next(part for part in address.split(".") if part.startswith(("google_", "terraform_")))
    if "labels" in values:
        yield from _of_labels(set(values["labels"] or {}), outlives=address.startswith("module.storage"))
    if kind in DESCRIBED and not all(f"{mark}=" in (values["description"] or "") for mark in MARKS):
        yield "has no labels, and does not say in its description whose it is"
    if len(values.get("name") or "") > LONGEST_NAME:
        yield "has a name that Google does not take"
    if kind == "google_compute_instance":
        yield from _of_instance(values)
    if kind == "google_compute_firewall" and values["allow"]:
        yield from _of_firewall(values)
    if kind.endswith("_iam_member"):
        allowed = ON_A_PROJECT if kind == "google_project_iam_member" else ON_A_THING
        if values["role"] not in allowed:
            yield f"grants {values['role']}"
    for name, value in FIXED.get(kind, {}).items():
        if values[name] != value:
            yield f"{name} is {values[name]}"


def _of_labels(labels: set[str], *, outlives: bool) -> Iterator[str]:
    if (OF_STORAGE if outlives else MARKS) - labels:
        yield "lacks the labels that teardown finds it by"
    if outlives and "clusterctl-id" in labels:
        yield "outlives the cluster, and would be removed with it"


def _of_instance(values: Values) -> Iterator[str]:
    interface, shield = values["network_interface"][0], values["shielded_instance_config"][0]
    if interface["access_config"] or interface["ipv6_access_config"]:
        yield "has a public address"
    if not (shield["enable_vtpm"] and shield["enable_integrity_monitoring"]):
        yield "is not shielded"
    if any(values["metadata"].get(key) != value for key, value in METADATA.items()):
        yield "metadata lets in more than the cluster's own key"
    if values["can_ip_forward"]:
        yield "may send packets in others' names"
    scheduling, gpus = values["scheduling"][0], values["guest_accelerator"]
    placed = "resource_policies" not in values  # which one is known later
    fixed = gpus or scheduling["preemptible"] or placed
    if fixed and scheduling["on_host_maintenance"] != "TERMINATE":
        yield "can't be migrated, and is to be"
    if scheduling["preemptible"] and scheduling["automatic_restart"]:
        yield "is spot, and is to be restarted"


def _of_firewall(values: Values) -> Iterator[str]:
    ranges, tcp_22 = values["source_ranges"] or [], [{"ports": ["22"], "protocol": "tcp"}]
    if ranges == [None]:  # Filestore's, which is known once it is there
        return
    if ranges and (ranges != [IAP] or values["allow"] != tcp_22):
        yield f"lets {', '.join(ranges)} in to {values['allow']}"


def _without_key(resources: Mapping[str, Values], key: str) -> Iterator[str]:
    for address, values in resources.items():
        if ".google_compute_instance.host" in address:
            disks = [values["boot_disk"][0], *values["attached_disk"]]
            encrypted = all(disk.get("kms_key_self_link") == key for disk in disks)
        elif ".google_compute_disk." in address:
            encrypted = [each.get("kms_key_self_link") for each in values["disk_encryption_key"]] == [key]
        else:
            continue
        if not encrypted:
            yield address
