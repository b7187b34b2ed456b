"""Mistakes planted in the module, and in what it is asked for: each is caught, in words that help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.provider import variables
from tests.support.google.module import CLUSTER_ID, PUBLIC_KEY, spec_of
from tests.unit.gcp.many import Edit, copies, planned
from tests.unit.gcp.policy import findings

KEY = "projects/my-keys/locations/us-central1/keyRings/disks/cryptoKeys/hpc"
HOST, NETWORK, IAM = "modules/instance/main.tf", "modules/network/main.tf", "modules/iam/main.tf"
BUCKET, STORAGE, ROOT = "modules/bucket/main.tf", "modules/storage/main.tf", "main.tf"
OF_STORAGE = {"clusterctl-cluster": "whole", "clusterctl-storage": "whole", "clusterctl-user": "ada"}

DISK = {"size_gib": 100, "type": "pd-balanced"}

# What Google would allow, and the module promises not to do.
AGAINST_A_PROMISE = {
    "public": (
        Edit(HOST, "    nic_type   = var.host.nic_type\n", "    access_config {}\n"),
        "public address",
    ),
    "range": (Edit(NETWORK, '"35.235.240.0/20"', '"0.0.0.0/0"'), "lets 0.0.0.0/0 in"),
    "port": (Edit(NETWORK, '["22"]', '["22", "3389"]'), "3389"),
    "undenied": (
        Edit(NETWORK, '"google_compute_firewall" "deny"', '"google_compute_firewall" "d"'),
        "is not denied",
    ),
    "allowed": (Edit(NETWORK, "  deny {", "  allow {"), "lets 0.0.0.0/0 in"),
    "others": (Edit(NETWORK, '"LIST_OF_SUBNETWORKS"', '"ALL_SUBNETWORKS_ALL_IP_RANGES"'), "ALL_SUBNETWORKS"),
    "label": (Edit(HOST, "labels                    = var.common.labels", "labels = {}"), "lacks the labels"),
    "marks": (Edit(ROOT, "    clusterctl-id      = var.cluster_id\n", ""), "lacks the labels"),
    "unsaid": (
        Edit(NETWORK, "nowhere else. ${var.mark}", "nowhere else."),
        "does not say in its description",
    ),
    "grant": (Edit(IAM, "roles/monitoring.metricWriter", "roles/editor"), "grants roles/editor"),
    "manager": (
        Edit(HOST, "roles/compute.instanceAdmin.v1", "roles/compute.admin"),
        "grants roles/compute.admin",
    ),
    "shield": (Edit(HOST, "enable_vtpm                 = true", "enable_vtpm = false"), "not shielded"),
    "keys": (
        Edit(HOST, 'block-project-ssh-keys  = "TRUE"', 'block-project-ssh-keys = "FALSE"'),
        "lets in more",
    ),
    "serial": (
        Edit(HOST, 'serial-port-enable      = "FALSE"', 'serial-port-enable = "TRUE"'),
        "lets in more",
    ),
    "boot": (
        Edit(HOST, "    auto_delete       = true\n    kms_key_self_link = var.common.kms_key\n", ""),
        "not encrypted",
    ),
    "extra": (Edit(HOST, "var.common.kms_key == null ? [] : [var.common.kms_key]", "[]"), "not encrypted"),
    "migrated": (Edit(HOST, '"TERMINATE" : "MIGRATE"', '"MIGRATE" : "MIGRATE"'), "can't be migrated"),
    "restarted": (Edit(HOST, "!var.host.spot && var", "var"), "is to be restarted"),
    "emptied": (Edit(BUCKET, "= false", "= true"), "force_destroy is True"),
    "exposed": (Edit(BUCKET, '"enforced"', '"inherited"'), "public_access_prevention is inherited"),
    "outliving": (
        Edit(ROOT, "merge(var.labels, var.storage.labels)", "merge(local.labels, var.storage.labels)"),
        "would be removed with it",
    ),
    "unsealed": (Edit(STORAGE, "var.kms_key == null ? [] : [var.kms_key]", "[]"), "not encrypted"),
    "disabled": (
        Edit(ROOT, "disable_on_destroy = false", "disable_on_destroy = true"),
        "disable_on_destroy is True",
    ),
}


def asked() -> dict[str, Any]:
    """A spot node with further disks, all encrypted, storage, a bucket, and rights to take itself down."""
    values = variables(spec_of("everything"), CLUSTER_ID, PUBLIC_KEY)
    node = {**values["hosts"]["whole-train-1"], "spot": True, "placement": None}
    hosts = {"whole-ctl": values["hosts"]["whole-ctl"], "whole-train-1": node}
    storage = {"name": "whole-shared", "labels": {**OF_STORAGE, "clusterctl-uid": "10000"}, "disk": DISK}
    services = ["compute.googleapis.com"]
    return {
        **values,
        "hosts": hosts,
        "kms_key": KEY,
        "auto_down": True,
        "placements": [],
        "filestore": None,
        "storage": storage,
        "services": services,
    }


@pytest.mark.sweep
def test_what_breaks_a_promise_is_found_in_the_plan(tmp_path: Path) -> None:
    edits = {name: edit for name, (edit, _) in AGAINST_A_PROMISE.items()}
    plan = copies(tmp_path, {"sound": asked(), **dict.fromkeys(edits, asked())}, edits).planned()
    found = {name: "\n".join(findings(planned(plan, name), kms_key=KEY)) for name in ("sound", *edits)}
    assert found.pop("sound") == ""
    assert {
        name: found[name] for name, (_, said) in AGAINST_A_PROMISE.items() if said not in found[name]
    } == {}


WRONG_VALUES = {
    "nowhere": ({"storage": {"name": "s", "labels": {}}}, "storage is one of disk and filestore"),
    "mortal": (
        {"storage": {"name": "s", "labels": {"clusterctl-id": "0123ab"}, "disk": DISK}},
        "storage.labels must not have clusterctl-id",
    ),
    "project": ({"project": "My Project"}, "project must be a project's id"),
    "region": ({"region": "us-central1-a"}, "region must be a region"),
    "zone": ({"zone": "us-central1"}, "zone must be a zone"),
    "cluster": ({"cluster": "a-name-of-more-than-20"}, "cluster must be a lower-case letter"),
    "id": ({"cluster_id": "0123"}, "cluster_id must be six hex digits"),
    "labels": ({"labels": {"Team": "vision"}}, "labels must be of lower-case letters"),
    "admin": ({"admin_user": "root"}, "admin_user must be an ordinary account"),
    "key": ({"admin_public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "a private key has no place here"),
    "service": ({"services": ["compute"]}, "services must be names such as compute.googleapis.com"),
    "cidr": ({"network": {"cidr": "10.80.0.0"}}, "network.cidr must be a range"),
    "half": ({"network": {"network": "company"}}, "go together"),
    "kms": ({"kms_key": "hpc"}, "kms_key must be projects/PROJECT"),
    "tier": ({"filestore": {"tier": "FAST", "capacity_gib": 1024}}, "filestore.tier must be"),
    "small": ({"filestore": {"tier": "ZONAL", "capacity_gib": 10}}, "must be at least 1024"),
    "controllers": ({"hosts": {}}, "Exactly one host must have the role"),
}
WRONG_HOSTS = {
    "role": ({"role": "login"}, 'of the role "compute" with one'),
    "image": ({"image": {"project": "p", "family": "f", "name": "n"}}, "give one of family and name"),
    "disk": ({"boot_disk": {"size_gib": 5, "type": "pd-ssd"}}, "A disk has at least 10 GiB"),
    "taken": ({"termination_action": "SLEEP"}, "termination_action must be STOP or DELETE"),
    "nic": ({"nic_type": "E1000"}, "nic_type must be GVNIC or VIRTIO_NET"),
    "fast": ({"nic_type": "VIRTIO_NET", "tier_1": True}, "tier_1 needs nic_type GVNIC"),
    "added": ({"guest_accelerator": {"type": "nvidia-l4", "count": 1}}, "goes with N1 machines only"),
}


def test_wrong_values_are_refused_in_words_that_say_what_is_right(tmp_path: Path) -> None:
    calls = {name: {**asked(), **wrong} for name, (wrong, _) in WRONG_VALUES.items()}
    calls |= {name: _with_node(wrong) for name, (wrong, _) in WRONG_HOSTS.items()}
    said = copies(tmp_path, calls, files="variables.tf").run("plan").said
    assert [name for name, (_, words) in {**WRONG_VALUES, **WRONG_HOSTS}.items() if words not in said] == []


def _with_node(wrong: Mapping[str, Any]) -> dict[str, Any]:
    values = asked()
    hosts = values["hosts"]
    return {**values, "hosts": {**hosts, "whole-train-1": {**hosts["whole-train-1"], **wrong}}}
