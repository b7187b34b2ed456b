"""The double of Google's Terraform provider refuses what the real provider refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gcp.module import Module, TerraformResult

MAIN = """
terraform {
  required_providers {
    google = { source = "hashicorp/google" }
  }
}
provider "google" {
  project = "some-project"
  region  = "us-central1"
  zone    = "us-central1-a"
}
variable "hosts" {
  type    = map(string)
  default = { one = "n1-standard-4", two = "n1-standard-4" }
}
resource "google_compute_network" "net" { name = "net" }
resource "google_compute_subnetwork" "sub" {
  name          = "sub"
  network       = google_compute_network.net.id
  ip_cidr_range = "10.80.0.0/24"
}
resource "google_compute_instance" "host" {
  for_each     = var.hosts
  name         = each.key
  machine_type = each.value
  labels       = { cluster = "demo" }
  boot_disk {
    initialize_params {
      image = "rocky-linux-cloud/rocky-linux-9"
    }
  }
  network_interface {
    subnetwork = google_compute_subnetwork.sub.id
  }
}
"""


class Folder(Module):
    def __init__(self, folder: Path) -> None:
        source = folder / "source"
        source.mkdir()
        (source / "main.tf").write_text(MAIN)
        super().__init__(folder, source=source)

    def make(self, **hosts: str) -> TerraformResult:
        """Apply, with these instances and their machine types."""
        return self.run(
            "apply", "-auto-approve", *([f"-var=hosts={json.dumps(hosts)}"] if hosts else [])
        )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


IN_USE = "is already being used by"


def test_cloud_double_refuses_a_machine_type_change_of_a_running_instance(folder: Folder) -> None:
    folder.apply()
    assert "allow_stopping_for_update" in folder.make(one="n1-standard-8", two="n1-standard-4").said
    assert folder.cloud.instances["one"]["machine_type"] == "n1-standard-4"


FIREWALL = {"name": "f", "network": "n", "allow": {"protocol": "tcp"}}
INSTANCE = {"name": "i", "machine_type": "m", "boot_disk": {}, "network_interface": {}}
RANGE = {"name": "s", "network": "n"}
# What Google's provider does not take, and a word of its refusal; the last one it takes.
ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "name": ("network", {"name": "Bad_Name"}, "Bad_Name"),
    "enum": ("network", {"name": "n", "routing_mode": "REGION"}, "routing_mode"),
    "cidr": ("subnetwork", RANGE | {"ip_cidr_range": "nonsense"}, "ip_cidr_range"),
    "bits": ("subnetwork", RANGE | {"ip_cidr_range": "10.0.0.0"}, "ip_cidr_range"),
    "range": ("firewall", FIREWALL | {"priority": 99999}, "priority"),
    "none": ("firewall", FIREWALL | {"allow": []}, "exactly one of allow, deny"),
    "both": ("firewall", FIREWALL | {"deny": {"protocol": "udp"}}, "exactly one of allow, deny"),
    "conflict": (
        "firewall",
        FIREWALL | {"source_tags": ["t"], "target_service_accounts": ["a"]},
        "tags",
    ),
    "least": (
        "instance",
        INSTANCE | {"scratch_disk": {"interface": "NVME", "size": 1}},
        "scratch_disk.size",
    ),
    "sound": (
        "firewall",
        FIREWALL | {"priority": 65535, "source_tags": ["t"], "target_tags": ["t"]},
        "",
    ),
}


def test_provider_double_refuses_invalid_resources(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "main.tf").write_text(MAIN.partition("variable")[0])
    for name, (kind, body, _) in ASKED.items():
        resource = {"resource": {f"google_compute_{kind}": {name: body}}}
        (source / f"{name}.tf.json").write_text(json.dumps(resource))
    told = json.loads(Module(tmp_path, source=source).run("validate", "-json").stdout)[
        "diagnostics"
    ]
    said: dict[str, str] = {}
    for each in told:
        name = each["range"]["filename"].partition(".")[0]
        said[name] = f"{said.get(name, '')} {each['summary']} {each['detail']}"
    assert {name for name, (*_, words) in ASKED.items() if words and words in said[name]} == set(
        said
    )
    assert set(ASKED) - set(said) == {"sound"}


NAT = {
    "router": "r",
    "nat_ip_allocate_option": "AUTO_ONLY",
    "source_subnetwork_ip_ranges_to_nat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
}
PORTS = NAT | {
    "enable_dynamic_port_allocation": True,
    "min_ports_per_vm": 64,
    "max_ports_per_vm": 4096,
}
DISK = {"initialize_params": {"image": "rocky-linux-cloud/rocky-linux-9"}}
MACHINE = {
    "machine_type": "a3-highgpu-1g",
    "boot_disk": DISK,
    "network_interface": {"subnetwork": "s"},
}
FLEX = {
    "provisioning_model": "FLEX_START",
    "automatic_restart": False,
    "on_host_maintenance": "TERMINATE",
    "instance_termination_action": "DELETE",
    "max_run_duration": {"seconds": 3600},
}
NONE = {"reservation_affinity": {"type": "NO_RESERVATION"}}


def flexible(**scheduling: Any) -> dict[str, Any]:
    return MACHINE | NONE | {"scheduling": FLEX | scheduling}


def reserved(name: str) -> dict[str, Any]:
    specific = {"key": "compute.googleapis.com/reservation-name", "values": [name]}
    return MACHINE | {
        "reservation_affinity": {"type": "SPECIFIC_RESERVATION", "specific_reservation": specific}
    }


# What Google does not take of a resource's settings, and a word of its refusal; the last ones it
# takes.
SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "odd": ("router_nat", PORTS | {"min_ports_per_vm": 48}, "power of two"),
    "few": ("router_nat", PORTS | {"min_ports_per_vm": 16}, "power of two"),
    "order": ("router_nat", PORTS | {"max_ports_per_vm": 64}, "greater than minPortsPerVm"),
    "mapping": (
        "router_nat",
        PORTS | {"enable_endpoint_independent_mapping": True},
        "exclude each other",
    ),
    "static": ("router_nat", NAT | {"max_ports_per_vm": 4096}, "needs enableDynamicPortAllocation"),
    "endless": ("instance", flexible(max_run_duration=[]), "maxRunDuration"),
    "long": ("instance", flexible(max_run_duration={"seconds": 604801}), "maxRunDuration"),
    "moving": ("instance", flexible(on_host_maintenance="MIGRATE"), "TERMINATE"),
    "restarting": ("instance", flexible(automatic_restart=True), "automaticRestart"),
    "unended": (
        "instance",
        flexible(instance_termination_action=None),
        "instanceTerminationAction",
    ),
    "booked": ("instance", reserved("mine") | {"scheduling": FLEX}, "NO_RESERVATION"),
    "family": ("instance", flexible() | {"machine_type": "g4-standard-48"}, "g4-standard-48"),
    "url": (
        "instance",
        reserved("https://google/projects/p/reservations/r"),
        "reservationAffinity",
    ),
    "unnamed": (
        "instance",
        MACHINE | {"reservation_affinity": {"type": "SPECIFIC_RESERVATION"}},
        "specific",
    ),
    "flexible": ("instance", flexible(), ""),
    "block": ("instance", reserved("projects/owner/reservations/r/reservationBlocks/b"), ""),
    "own": ("instance", reserved("mine"), ""),
    "ports": ("router_nat", PORTS, ""),
    "plain": ("router_nat", NAT, ""),
}


def test_provider_double_refuses_invalid_combinations(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "main.tf").write_text(MAIN.partition("variable")[0])
    for name, (kind, body, _) in SETTINGS.items():
        resource = {
            f"google_compute_{kind}": {name: {"name": f"{kind.replace('_', '-')}-{name}", **body}}
        }
        (source / f"{name}.tf.json").write_text(json.dumps({"resource": resource}))
    told = map(
        json.loads,
        Module(tmp_path, source=source).run("apply", "-auto-approve", "-json").stdout.splitlines(),
    )
    wrong = [each["diagnostic"] for each in told if each["type"] == "diagnostic"]
    said = {each["address"].partition(".")[2]: each["summary"] for each in wrong}
    assert set(said) == {name for name, (*_, words) in SETTINGS.items() if words}
    assert [name for name, text in said.items() if SETTINGS[name][2] not in text] == []


SHARED = """
resource "google_compute_disk" "shared" {
  name = "shared"
  zone = "us-central1-a"
  type = "pd-balanced"
  size = 100
}
"""
ATTACHED = "  attached_disk {\n    source = google_compute_disk.shared.id\n  }\n  boot_disk {"


def test_cloud_double_attaches_a_disk_once_and_never_shrinks_it(folder: Folder) -> None:
    text = MAIN.replace("  boot_disk {", ATTACHED) + SHARED
    (folder.path / "main.tf").write_text(text)
    refused = folder.make()
    assert refused.rc != 0
    assert IN_USE in refused.said
    (name,) = folder.cloud.instances
    assert folder.make(**{name: "n1-standard-4"}).rc == 0
    for size, action in (("200", ["update"]), ("50", ["delete", "create"])):
        (folder.path / "main.tf").write_text(text.replace("size = 100", f"size = {size}"))
        assert folder.plan()["google_compute_disk.shared"] == action
    assert folder.run("state", "rm", f'google_compute_instance.host["{name}"]').rc == 0
    assert folder.run("destroy", "-auto-approve", "-target=google_compute_disk.shared").rc == 0
    # It was detached, then deleted.
    assert not folder.cloud.instances[name]["attached_disk"]
