"""The double of Google's provider plans what the real provider planned, address by address.

recorded/plans.json has the plans of the real provider (version 8, with Terraform 1.11.4) on 2026-11-29, in
front of a stand-in for Google's APIs: six sets of the module's variables, and for each what changes in the
variables, or in the cloud behind Terraform's back. Since then the module has changed: the addresses
of hosts are today's, and `now` has what it plans otherwise, and why. The disk of `kept` has moved to a
module of its own, so its variables are those of that module. Hosts no longer have further disks: without
them, all cases were played again at the double, and are otherwise as the real provider planned them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from clusterctl.util.assets import data_folder
from tests.support.google.provider.world import COMPUTE
from tests.unit.gcp.module import Module

pytestmark = pytest.mark.platform("rendered", "google-terraform")

RECORDED = json.loads((Path(__file__).parent / "recorded" / "plans.json").read_text())
World = dict[str, Any]
Row = dict[str, Any]


def _rows(world: World, kind: str) -> dict[str, Row]:
    found: dict[str, Row] = world["resources"][f"google_{kind}"]
    return found


def _host(world: World, name: str) -> Row:
    return next(row for row in _rows(world, "compute_instance").values() if row["name"] == name)


def _remove(world: World, kind: str, key: str, value: str) -> None:
    rows = _rows(world, kind)
    for identity in [identity for identity, row in rows.items() if str(row[key]).endswith(value)]:
        del rows[identity]


def _stop_all(world: World) -> None:
    for row in _rows(world, "compute_instance").values():
        row["current_status"] = "TERMINATED"


def _attach(world: World) -> None:
    disk = f"{COMPUTE}projects/my-project/zones/us-central1-a/disks/mine"
    unset = (
        "disk_encryption_key_raw",
        "disk_encryption_key_rsa",
        "disk_encryption_key_sha256",
        "disk_encryption_service_account",
        "force_attach",
        "kms_key_self_link",
    )
    attached = {"source": disk, "device_name": "mine", "mode": "READ_WRITE"}
    _host(world, "cheap-ctl")["attached_disk"] = [attached | dict.fromkeys(unset)]


def _label(world: World, labels: Mapping[str, str], *names: str) -> None:
    for name in names:
        _host(world, "cheap-train-1")[name] = dict(labels)


def _add_label_of_google(world: World) -> None:
    labels = _host(world, "cheap-train-1")["effective_labels"]
    _label(world, labels | {"goog-ops-agent-policy": "v2"}, "effective_labels")


# What happened to the cloud in the cases with `world`.
EVENTS: Mapping[str, Callable[[World], object]] = {
    "api-off-outside": lambda w: _remove(w, "project_service", "service", "iap.googleapis.com"),
    "ctl-stopped-nodes-stopped": _stop_all,
    "filestore-gone": lambda w: _remove(w, "filestore_instance", "name", ""),
    "foreign-disk-attached": _attach,
    "label-edited": lambda w: _label(
        w, {"x": "y"}, "labels", "effective_labels", "terraform_labels"
    ),
    "machine-outside": lambda w: _host(w, "cheap-ctl").update(machine_type="n2-standard-8"),
    "node-vanished": lambda w: _remove(w, "compute_instance", "name", "cheap-train-1"),
    "node-vanished-disk-left": lambda w: _remove(w, "compute_instance", "name", "cheap-train-1"),
    "os-config-labels": _add_label_of_google,
    "preempted-delete": lambda w: _remove(w, "compute_instance", "name", "flexy-cheap-1"),
    "preempted-stop": lambda w: _host(w, "flexy-stop-1").update(current_status="TERMINATED"),
    "router-nat-gone": lambda w: _remove(w, "compute_router_nat", "name", ""),
    "sa-deleted": lambda w: _remove(w, "service_account", "account_id", "-n"),
    "stopping": lambda w: _host(w, "flexy-stop-1").update(current_status="STOPPING"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECORDED["inputs"])
def test_double_plans_what_the_real_provider_planned(tmp_path: Path, name: str) -> None:
    source = "gcp-storage" if name == "kept" else "gcp"
    module = Module(tmp_path, source=data_folder("terraform") / source)
    asked = RECORDED["inputs"][name]
    module.set(asked)
    module.apply()
    assert module.plan() == {}
    with module.cloud.store.change() as world:
        before = deepcopy(world)
    differing = {}
    cases = {key: case for key, case in RECORDED["cases"].items() if case["input"] == name}
    for key, case in cases.items():
        with module.cloud.store.change() as world:
            world.clear()
            world.update(deepcopy(before))
            if "world" in case:
                EVENTS[key](world)
        module.set(_changed(asked, case["change"]))
        if error := case.get("fails"):
            result = module.run("plan")
            assert result.rc == 1
            assert error in result.said
            continue
        planned = _described(module.planned())
        expected = case["plan"] | case.get("now", {}).get("plan", {})
        differing |= {
            f"{key}: {address}": (planned.get(address), expected.get(address))
            for address in planned.keys() | expected.keys()
            if planned.get(address) != expected.get(address)
        }
    assert differing == {}


def _changed(asked: Mapping[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the variables with the changes of a case."""
    changed = deepcopy(dict(asked))
    for change in changes:
        *above, last = change["at"]
        place = changed
        for word in above:
            place = place[word]
        if "is" in change:
            place[last] = change["is"]
        else:
            del place[last]
    return changed


def _described(plan: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return address -> actions, what differs, and what forces a new resource."""
    return {
        raw["address"]: _change(raw["change"])
        for raw in plan["resource_changes"]
        if raw["change"]["actions"] != ["no-op"] and raw["type"] != "terraform_data"
    }


def _change(change: Mapping[str, Any]) -> dict[str, list[str]]:
    described = {"actions": sorted(change["actions"])}
    if paths := change.get("replace_paths"):
        described["because"] = sorted(".".join(map(str, path)) for path in paths)
    if change["actions"] == ["update"]:
        unknown = change.get("after_unknown") or {}
        described["differs"] = sorted(
            name
            for name in change["before"]
            if change["before"][name] != change["after"].get(name)
            or "true" in json.dumps(unknown.get(name))
        )
    return described
