"""The effects of spec changes on existing hosts, by real Terraform: a table of docs/gcp.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from clusterctl.providers.gcp.provider import variables
from clusterctl.spec.load import parse_spec
from tests.support.processes import ROOT
from tests.unit.gcp.module import CLUSTER_ID, PUBLIC_KEY, Module

pytestmark = pytest.mark.platform("rendered", "google-terraform")

KMS = "projects/my-keys/locations/us-central1/keyRings/disks/cryptoKeys/hpc"
DEBIAN = {"project": "debian-cloud", "family": "debian-12"}
Settings = Mapping[str, Any]


def variables_of(*, nodes: int = 2, key: str = PUBLIC_KEY, **more: Settings) -> dict[str, Any]:
    """The variables of a cluster with Filestore.

    ``more``: other settings of the `provider`, the `controller`, and the partition `train`.
    """
    provider = {"type": "gcp", "project": "my-project", "zone": "us-central1-a"}
    controller = {"machine_type": "n2-standard-4", **more.get("controller", {})}
    train = {"machine_type": "n2-standard-16", **more.get("train", {})}
    provider |= {"enable_apis": False, "filestore": {"tier": "BASIC_SSD", "capacity": "2560GiB"}}
    provider |= {
        "controller": controller,
        "partitions": {"train": train},
        **more.get("provider", {}),
    }
    spec = {"version": 1, "name": "demo", "partitions": [{"name": "train", "nodes": nodes}]}
    text = StringIO()
    YAML(typ="safe").dump({**spec, "provider": provider}, text)
    return variables(parse_spec(text.getvalue(), "cluster.yaml"), CLUSTER_ID, key)


def both(**settings: Any) -> dict[str, Settings]:
    return {"controller": settings, "train": settings}


CHANGED = {"controller": {"update"}, "nodes": {"update"}}
NODES = {"nodes": {"replace"}}
# What is changed -> how, and what is done to the controller, the nodes and Filestore.
EFFECTS: Mapping[str, tuple[dict[str, Any], Mapping[str, set[str]]]] = {
    "nodes": ({"nodes": 3}, {"nodes": {"create"}}),
    "labels": (
        {"provider": {"labels": {"team": "vision"}}},
        {**CHANGED, "filestore": {"update"}},
    ),
    "key": ({"key": PUBLIC_KEY.replace("Public", "Second")}, CHANGED),
    "machine_type": (
        both(machine_type="n2-standard-32"),
        {"controller": {"update"}, "nodes": {"replace"}},
    ),
    "secure_boot": (
        {"provider": {"secure_boot": True}},
        {"controller": {"update"}, "nodes": {"replace"}},
    ),
    "image": (both(image=DEBIAN), NODES),
    "boot_disk": ({"train": {"boot_disk": {"size": "50GiB", "type": "pd-ssd"}}}, NODES),
    "boot_disk larger": (both(boot_disk={"size": "200GiB"}), CHANGED),
    "reservation": ({"train": {"reservation": "mine"}}, NODES),
    "gvnic": ({"train": {"gvnic": False}}, NODES),
    "local_ssds": ({"train": {"local_ssds": 2}}, NODES),
    "spot": ({"train": {"spot": True}}, NODES),
    "flex_start": ({"train": {"machine_type": "g2-standard-16", "flex_start": "2d"}}, NODES),
    "compact_placement": ({"train": {"compact_placement": True}}, NODES),
    "tier_1": ({"train": {"machine_type": "n2-standard-32", "tier_1": True}}, NODES),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The module after the cluster was created."""
    made = Module(tmp_path_factory.mktemp("effects"))
    made.set(variables_of())
    made.apply()
    return made


@pytest.mark.parametrize("what", EFFECTS)
def test_spec_change_has_the_effect_in_the_manual(module: Module, what: str) -> None:
    changed, expected = EFFECTS[what]
    module.set(variables_of(**changed))
    done: dict[str, set[str]] = {}
    for address, actions in module.plan().items():
        if part := _part(address):
            done.setdefault(part, set()).add("replace" if len(actions) > 1 else actions[0])
    assert done == expected


def _part(address: str) -> str:
    """Return the row of the table that a resource belongs to. "" if it belongs to none."""
    if "google_filestore_instance" in address:
        return "filestore"
    if ".google_compute_instance.host[" not in address:
        return ""
    return "controller" if address.startswith("module.controller.") else "nodes"


def test_every_setting_in_the_table_of_the_manual_is_tested() -> None:
    page = (Path(ROOT) / "docs" / "gcp.md").read_text()
    table = page.partition("Effects of a spec change")[2].partition("\n\n")[2].partition("\n\n")[0]
    named = {
        word
        for row in table.splitlines()
        for word in re.findall("`([a-z_0-9]+)`", row.split("|")[1])
    }
    # Of these: test_gcp_fixed.py, test_gcp_storage.py.
    refused = {"project", "zone", "network", "kms_key", "state", "filestore", "shared_disk"}
    assert named - refused <= {what.split()[0] for what in EFFECTS}
