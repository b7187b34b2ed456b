"""Mistakes in what the module is asked for: each is refused in words that help."""

from __future__ import annotations

from pathlib import Path

from clusterctl.providers.gcp.provider import variables
from tests.unit.gcp.many import copies
from tests.unit.gcp.module import CLUSTER_ID, PUBLIC_KEY, spec_of

DISK = {"size_gib": 100, "type": "pd-balanced"}
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
    asked = variables(spec_of("everything"), CLUSTER_ID, PUBLIC_KEY)
    node = asked["hosts"]["whole-train-1"]
    calls = {name: {**asked, **wrong} for name, (wrong, _) in WRONG_VALUES.items()}
    for name, (wrong, _) in WRONG_HOSTS.items():
        calls[name] = {**asked, "hosts": {**asked["hosts"], "whole-train-1": {**node, **wrong}}}
    said = copies(tmp_path, calls, files="variables.tf").run("plan").said
    assert [name for name, (_, words) in {**WRONG_VALUES, **WRONG_HOSTS}.items() if words not in said] == []
