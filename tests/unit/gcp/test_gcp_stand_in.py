"""The stand-in for Google's provider: what others' tests build on is what Google's would do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.google.cloud import GoogleCloud

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
HOST = 'google_compute_instance.host["one"]'


class Folder:
    """A Terraform configuration in a folder of its own, and the cloud that it works on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "module"
        self.path.mkdir()
        self.cloud = GoogleCloud(folder)
        (self.path / "main.tf").write_text(MAIN)
        assert self("init").returncode == 0

    def __call__(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = ["terraform", verb, "-no-color", *options]
        env = {**os.environ, **self.cloud.env}
        return subprocess.run(
            command, cwd=self.path, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    def apply(self, **hosts: str) -> subprocess.CompletedProcess[str]:
        return self("apply", "-auto-approve", *([f"-var=hosts={json.dumps(hosts)}"] if hosts else []))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_what_is_applied_exists_and_is_planned_no_more(folder: Folder) -> None:
    folder.cloud.addresses({"one": "10.9.9.9"})
    assert folder.apply().returncode == 0
    one, two = (folder.cloud.instances[name] for name in ("one", "two"))
    assert one["network_interface"][0]["network_ip"] == "10.9.9.9"
    assert two["network_interface"][0]["network_ip"].startswith("10.80.0.")
    assert two["id"] == "projects/some-project/zones/us-central1-a/instances/two"
    assert one["effective_labels"] == {"cluster": "demo", "goog-terraform-provisioned": "true"}
    assert folder("plan", "-detailed-exitcode").returncode == 0
    assert folder("destroy", "-auto-approve").returncode == 0
    assert folder.cloud.resources() == {}


FAULTS = {
    "quota": "Quota 'NVIDIA_T4_GPUS' exceeded",
    "stockout": "does not have enough resources available to fulfill the request",
    "permission": "Required 'compute.instances.create' permission for",
    "api_off": "Compute Engine API has not been used in project",
    "bad_zone": "zones/us-central1-a' was not found",
}


def test_a_fault_is_told_and_leaves_nothing_of_what_it_struck(folder: Folder) -> None:
    hosts = dict.fromkeys([*(kind.replace("_", "-") for kind in FAULTS), "sound"], "n1-standard-4")
    for kind in FAULTS:
        folder.cloud.fail(kind, name=kind.replace("_", "-"))
    failed = folder.apply(**hosts)
    assert failed.returncode == 1
    said = " ".join(failed.stderr.replace("│", " ").split())
    assert [kind for kind, text in FAULTS.items() if text not in said] == []
    assert set(folder.cloud.instances) == {"sound"}
    folder.cloud.heal()
    folder.cloud.fail("no_credentials", times=1)
    assert "neither `credentials` nor `access_token`" in " ".join(folder.apply().stderr.split())
    assert folder.apply(**hosts).returncode == 0
    assert set(folder.cloud.instances) == set(hosts)


def test_a_fault_plays_from_the_nth_on_and_as_often_as_it_is_said_to(folder: Folder) -> None:
    folder.cloud.fail("stockout", nth=2, times=1)
    assert folder.apply(a="n1", b="n1", c="n1").returncode == 1
    assert len(folder.cloud.instances) == 2
    assert folder.apply(a="n1", b="n1", c="n1").returncode == 0


def test_a_crash_before_the_state_leaves_an_instance_whose_name_is_taken(folder: Folder) -> None:
    folder.cloud.fail("crash", name="two", times=1)
    crashed = folder.apply()
    assert crashed.returncode == 1
    assert "Plugin did not respond" in crashed.stderr
    assert "two" in folder.cloud.instances
    assert 'host["two"]' not in folder("state", "list").stdout
    again = folder.apply()
    assert "instances/two' already exists, alreadyExists" in " ".join(again.stderr.replace("│", " ").split())
    stuck = folder("destroy", "-auto-approve")
    assert "is already being used by" in stuck.stderr
    identifier = folder.cloud.instances["two"]["id"]
    assert folder("import", 'google_compute_instance.host["two"]', identifier).returncode == 0
    assert folder("destroy", "-auto-approve").returncode == 0
    assert folder.cloud.resources() == {}


def test_what_google_changes_only_on_a_stopped_instance_is_refused(folder: Folder) -> None:
    assert folder.apply().returncode == 0
    refused = folder.apply(one="n1-standard-8", two="n1-standard-4")
    assert "allow_stopping_for_update" in refused.stderr
    assert folder.cloud.instances["one"]["machine_type"] == "n1-standard-4"


def _another_image(text: str) -> str:
    return text.replace("rocky-linux-9", "rocky-linux-8")


def _another_label(text: str) -> str:
    return text.replace('"demo"', '"other"')


@pytest.mark.parametrize(
    ("change", "action"), [(_another_image, ["delete", "create"]), (_another_label, ["update"])]
)
def test_a_change_is_made_in_place_only_where_google_can(
    folder: Folder, change: Callable[[str], str], action: list[str]
) -> None:
    assert folder.apply().returncode == 0
    (folder.path / "main.tf").write_text(change(MAIN))
    assert folder("plan", "-out=plan").returncode == 0
    changes = json.loads(folder("show", "-json", "plan").stdout)["resource_changes"]
    assert [each["change"]["actions"] for each in changes if each["address"] == HOST] == [action]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("google_compute_instance", "google_compute_instances", "Invalid resource type"),
        ("machine_type = each.value", "machine_kind = 1", "Unsupported argument"),
        ('{ cluster = "demo" }', '"demo"', "map of string required"),
        ("machine_type = each.value", "", "Missing required argument"),
    ],
)
def test_the_schema_is_googles(folder: Folder, right: str, wrong: str, said: str) -> None:
    (folder.path / "main.tf").write_text(MAIN.replace(right, wrong))
    refused = folder("validate")
    assert refused.returncode == 1
    assert said in refused.stderr


def test_both_versions_of_the_schema_are_served(tmp_path: Path) -> None:
    cloud = GoogleCloud(tmp_path, version="6.50.0")
    (tmp_path / "main.tf").write_text(MAIN)
    env = {**os.environ, **cloud.env}
    subprocess.run(["terraform", "init"], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=60)
    subprocess.run(
        ["terraform", "validate"], cwd=tmp_path, env=env, check=True, capture_output=True, timeout=60
    )
    assert 'version = "6.50.0"' in (tmp_path / ".terraform.lock.hcl").read_text().replace("  ", " ")
