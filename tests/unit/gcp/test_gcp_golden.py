"""The plans of four specs, made in one run of Terraform: golden files, and what must hold of each.

UPDATE_GOLDEN=1 writes the files, and the recorded plan of recorded.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.provider import variables
from clusterctl.spec import gcp
from tests.unit.gcp import recorded
from tests.unit.gcp.many import changes, copies, planned
from tests.unit.gcp.module import CLUSTER_ID, NAMES, PUBLIC_KEY, spec_of

pytestmark = pytest.mark.platform("rendered", "google-terraform")

GOLDEN = Path(__file__).with_name("golden")
SIMPLEST = "t4"  # the others show only in what they differ from it
# Said once for all: they follow from others, or say the same of every resource.
LEFT_OUT = frozenset({"effective_labels", "terraform_labels", "project", "metadata"})
Resources = Mapping[str, Mapping[str, Any]]


Plan = Mapping[str, Any]


def asked() -> dict[str, dict[str, Any]]:
    """The variables of the specs, by name."""
    return {name: variables(spec_of(name), CLUSTER_ID, PUBLIC_KEY) for name in NAMES}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """What Terraform would make of the specs, of the longest names, and of the cluster that is recorded."""
    more = {"demo": recorded.asked(), "long": with_long_names(asked()["everything"])}
    return copies(tmp_path_factory.mktemp("golden"), asked() | more).planned()


def with_long_names(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster and a node whose names are as long as they may be; the node has disks of several types."""
    cluster, hosts = "c" * 20, asked["hosts"]
    disks = [{"size_gib": 100, "type": kind} for kind in ("pd-standard", "pd-balanced", "hyperdisk-balanced")]
    node = {**hosts["whole-train-1"], "extra_disks": disks}
    renamed = {f"{cluster}-ctl": hosts["whole-ctl"], f"{cluster}-{'p' * 20}-999": node}
    return {**asked, "cluster": cluster, "hosts": renamed, "bucket": None}


def is_golden(path: Path, text: str) -> Iterator[str]:
    """The lines in which a file differs from the text; written first with UPDATE_GOLDEN=1."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    yield from unified_diff(path.read_text().splitlines(), text.splitlines(), path.name, "today", lineterm="")


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_its_golden_file_and_keeps_every_promise(plan: Plan, name: str) -> None:
    resources, spec = planned(plan, name), spec_of(name)
    assert findings(resources, kms_key=gcp.settings_of(spec).kms_key) == []
    known = {} if name == SIMPLEST else described(planned(plan, SIMPLEST), spec_of(SIMPLEST).name)
    text = rendered(described(resources, spec.name), {_NODE.sub("NODE", each): known[each] for each in known})
    assert [*is_golden(GOLDEN / f"{name}.txt", text)] == []


HOST = "google_compute_instance.host"
# What is found of a planned attribute: its resource, the way to it, and a value that breaks a promise.
MISTAKES: list[tuple[str, str, Sequence[str | int], Any]] = [
    ("public address", HOST, ("network_interface", 0, "access_config"), [{}]),
    ("not shielded", HOST, ("shielded_instance_config", 0, "enable_vtpm"), False),
    ("can't be migrated", f'["whole-train-1"].{HOST}', ("scheduling", 0, "on_host_maintenance"), "MIGRATE"),
    ("lacks the labels", HOST, ("labels",), {}),
    ("not encrypted", HOST, ("boot_disk", 0, "kms_key_self_link"), None),
    ("lets 0.0.0.0/0 in", "google_compute_firewall.iap_ssh", ("source_ranges",), ["0.0.0.0/0"]),
    ("description", "google_compute_firewall.iap_ssh", ("description",), "for SSH"),
    ("roles/editor", "google_project_iam_member", ("role",), "roles/editor"),
    ("would be removed", "module.storage", ("labels", "clusterctl-id"), "0123ab"),
    ("disable_on_destroy", "google_project_service", ("disable_on_destroy",), True),
]


@pytest.mark.parametrize(("words", "of", "way", "value"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_a_broken_promise_is_found(
    plan: Plan, words: str, of: str, way: Sequence[str | int], value: Any
) -> None:
    resources: Any = deepcopy({**planned(plan, "everything"), **planned(plan, "kept")})
    kms_key = gcp.settings_of(spec_of("kept")).kms_key
    before = findings(resources, kms_key=kms_key)
    place = next(values for address, values in resources.items() if of in address)
    for step in way[:-1]:
        place = place[step]
    place[way[-1]] = value
    (found,) = set(findings(resources, kms_key=kms_key)) - set(before)
    assert words in found


def test_the_longest_names_are_not_too_long_for_google(plan: Plan) -> None:
    resources = planned(plan, "long")
    assert findings(resources, kms_key=None) == []
    accounts = [each["account_id"] for each in resources.values() if "account_id" in each]
    # Google takes 6 to 30 characters.
    assert sorted(map(len, accounts)) == [29, 29]


def test_the_recorded_plan_is_todays(plan: Plan) -> None:
    assert [*is_golden(recorded.PATH, recorded.as_file(changes(plan, "demo")))] == []


def rendered(resources: Mapping[str, Sequence[str]], simplest: Mapping[str, Sequence[str]] = {}) -> str:
    """The resources as text that is easy to compare; what is as in the simplest cluster is left out."""
    known, blocks = dict(simplest), []
    for address, lines in resources.items():
        general = _NODE.sub("NODE", address)
        before = known.setdefault(general, lines)
        gone, more = ([one for one in a if one not in b] for a, b in ((before, lines), (lines, before)))
        if before is lines:
            blocks.append(f"{address}\n" + "".join(f"  {line}\n" for line in lines))
        else:
            blocks.append(f"{address}: as known{', but' if gone or more else ''}\n")
            blocks += [*(f"  - {line}\n" for line in gone), *(f"  + {line}\n" for line in more)]
    return "".join(blocks)


_NODE = re.compile(r"CLUSTER-[a-z]+-[0-9]+")


def described(resources: Resources, cluster: str) -> dict[str, list[str]]:
    """Address -> its attributes, a line each, without the names of the cluster and of a node."""

    def general(text: str) -> str:
        return re.sub(rf"\b{cluster}\b", "CLUSTER", text)

    return {
        general(address): [_NODE.sub("NODE", general(line)) for line in _lines(_short(values))]
        for address, values in resources.items()
    }


def _short(value: Any) -> Any:
    """Without what is not said, and what is said of every resource."""
    if isinstance(value, Mapping):
        short = {key: _short(each) for key, each in value.items() if key not in LEFT_OUT}
        return {key: each for key, each in short.items() if each not in (None, [], {}, "")}
    return [_short(each) for each in value] if isinstance(value, list) else value


def _lines(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, each in sorted(values.items()):
        inner = each[0] if isinstance(each, list) and len(each) == 1 else each
        if isinstance(inner, Mapping) and key != "labels":
            yield from _lines(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}: {inner}"


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
