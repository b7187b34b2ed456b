"""Settings of a single resource that Google's API refuses: the conditions, without the texts.

NAT: RouterNat of Google's discovery document compute.v1 of 2026-11-06;
hashicorp/terraform-provider-google at e03b7622 (2026-08-21), descriptions in
services/compute/resource_compute_router_nat.go.

Flex-start instances: the same repository, website/docs/r/compute_instance.html.markdown, and the
test flexStart of services/compute/resource_compute_instance_test.go; about-flex-start-vms of
cloud.google.com/compute/docs/instances (2026-10); GoogleCloudPlatform/cluster-toolkit at 10470803
(2026-06-25), docs/slurm-dws-flex.md.

Reservations: ReservationAffinity of the discovery document; expandReservationAffinity of the
provider's services/compute/compute_instance_helpers.go; the nodeset's variables.tf of
cluster-toolkit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from typing import Any

_LEAST_PORTS = 32
_LEAST_PORTS_WITHOUT = 64


def refused_by_google(kind: str, planned: Mapping[str, Any]) -> str | None:
    """The answer to a resource with these settings, or None if Google takes them."""
    problem = next(_RULES[kind](planned), None) if kind in _RULES else None
    return (
        problem
        and f"Error creating {kind.rpartition('_')[2]}: googleapi: Error 400: {problem}, invalid"
    )


def refused_update(kind: str, prior: Mapping[str, Any], planned: Mapping[str, Any]) -> str | None:
    """The answer to a change in place, or None if Google takes it.

    A boot disk never shrinks: github.com/hashicorp/terraform-provider-google/issues/8597
    (2021-03-03). The provider asks for it since it grows them in place: `size` of initialize_params
    in services/compute/resource_compute_instance.go at e03b7622 has no ForceNew, and line 3185.
    """
    if kind != "google_compute_instance":
        return None
    new, old = (each["boot_disk"][0]["initialize_params"][0]["size"] for each in (planned, prior))
    if new >= old:
        return None
    return (
        f"Error updating disk: googleapi: Error 400: Invalid value for field 'sizeGb': '{new:g}'. "
        f"New disk size '{new:g}' GiB must be larger than existing size '{old:g}' GiB., invalid"
    )


def _of_nat(nat: Mapping[str, Any]) -> Iterator[str]:
    least, most = (
        nat[name] if isinstance(nat[name], int | float) else None
        for name in ("min_ports_per_vm", "max_ports_per_vm")
    )
    if nat["enable_dynamic_port_allocation"] is not True:
        if most:
            yield "maxPortsPerVm needs enableDynamicPortAllocation"
        return
    if nat["enable_endpoint_independent_mapping"] is True:
        yield "enableDynamicPortAllocation and enableEndpointIndependentMapping exclude each other"
    for name, ports in (("minPortsPerVm", least), ("maxPortsPerVm", most)):
        if ports and (ports < _LEAST_PORTS or int(ports).bit_count() != 1):
            yield f"{name} must be a power of two from {_LEAST_PORTS} on, not {ports:g}"
    if most and most <= (least or _LEAST_PORTS_WITHOUT):
        yield "maxPortsPerVm must be greater than minPortsPerVm"


# Families of machine types with GPUs of their own, except A4X and G4; and H4D.
_FLEX_START_FAMILIES = {"a2", "a3", "a4", "g2", "h4d"}
_FLEX_START_S = (600, 7 * 86400)
_RESERVATION = re.compile(
    r"(projects/[a-z0-9-]+/reservations/)?[a-z0-9-]+"
    r"(/reservationBlocks/[a-z0-9-]+(/reservationSubBlocks/[a-z0-9-]+)?)?"
)


def _of_instance(instance: Mapping[str, Any]) -> Iterator[str]:
    affinity = _only(instance["reservation_affinity"])
    specific = affinity.get("specific_reservation") or ()
    if (affinity.get("type") == "SPECIFIC_RESERVATION") != bool(specific):
        yield "specific_reservation must be set for SPECIFIC_RESERVATION, and not otherwise"
    for name in (name for each in specific for name in each["values"]):
        if not _RESERVATION.fullmatch(name):
            yield f"Invalid value for field 'resource.reservationAffinity': {name}"
    scheduling = _only(instance["scheduling"])
    if scheduling.get("provisioning_model") == "FLEX_START":
        yield from _of_flex_start(instance["machine_type"], affinity.get("type"), scheduling)


def _only(blocks: Sequence[Mapping[str, Any]] | None) -> Mapping[str, Any]:
    """The block that there may be, or an empty one."""
    return next(iter(blocks or ()), {})


def _of_flex_start(
    machine_type: str, affinity: str | None, scheduling: Mapping[str, Any]
) -> Iterator[str]:
    least, most = _FLEX_START_S
    duration = _only(scheduling["max_run_duration"]).get("seconds", 0)
    if not least <= duration <= most:
        yield f"FLEX_START needs maxRunDuration from {least} to {most} seconds, not {duration:g}"
    if scheduling["on_host_maintenance"] != "TERMINATE" or scheduling["automatic_restart"]:
        yield "FLEX_START needs onHostMaintenance TERMINATE and no automaticRestart"
    if scheduling["preemptible"] or scheduling["instance_termination_action"] not in (
        "STOP",
        "DELETE",
    ):
        yield "FLEX_START needs instanceTerminationAction, and is not preemptible"
    if affinity != "NO_RESERVATION":
        yield "FLEX_START can't use reservations: reservationAffinity must be NO_RESERVATION"
    if machine_type.partition("-")[0] not in _FLEX_START_FAMILIES:
        yield f"FLEX_START does not support {machine_type}"


def _of_firewall(rule: Mapping[str, Any]) -> Iterator[str]:
    # cloud.google.com/vpc/docs/shared-vpc: the rules of a Shared VPC are in its host project.
    if _network_project(rule["network"]) not in {None, rule["project"]}:
        yield f"the network {rule['network']} is not in the project {rule['project']}"
    # Firewall of the discovery document: "These ranges must be expressed in CIDR format."
    for text in rule["source_ranges"] or ():
        try:
            ip_network(text)
        except ValueError:
            yield f"sourceRanges must be in CIDR format, not {text!r}"


_PROJECT = re.compile(r"(?:.*/)?projects/([^/]+)/")


def _network_project(text: Any) -> str | None:
    """The project in a path of a network, if it is known."""
    match = _PROJECT.match(text) if isinstance(text, str) else None
    return match and match[1]


def _of_filestore(instance: Mapping[str, Any]) -> Iterator[str]:
    """cloud.google.com/filestore/docs/architecture: "service projects cannot directly create
    Filestore instances on the shared VPC network"; with private services access they can:
    connectMode of the discovery document file.v1.
    """
    for network in instance["networks"]:
        project = _network_project(network["network"])
        is_direct = network["connect_mode"] == "DIRECT_PEERING"
        if is_direct and project not in {None, instance["project"]}:
            yield "a service project can't peer a Shared VPC directly with Filestore"


_RULES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "google_compute_firewall": _of_firewall,
    "google_compute_instance": _of_instance,
    "google_compute_router_nat": _of_nat,
    "google_filestore_instance": _of_filestore,
}
