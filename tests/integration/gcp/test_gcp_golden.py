"""The plans of four specs, made in one run of Terraform, equal golden files.

UPDATE_GOLDEN=1 writes the files, and the recorded plan of recorded.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.provider import variables
from clusterctl.providers.gcp.storage import own_variables
from clusterctl.util.assets import data_folder
from tests.unit.gcp import recorded
from tests.unit.gcp.many import changes, copies, planned
from tests.unit.gcp.module import CLUSTER_ID, NAMES, PUBLIC_KEY, Module, spec_of
from tests.unit.gcp.sent import REQUESTS, unrecorded

pytestmark = pytest.mark.platform("rendered", "google-terraform")

KMS_KEY = "projects/my-keys/locations/europe-west4/keyRings/disks/cryptoKeys/hpc"
DISK = "projects/my-project/zones/us-central1-a/disks/lasting-data"
GOLDEN = Path(__file__).with_name("golden")
SIMPLEST = "t4"  # the others show only in what they differ from it
# Said once for all: they follow from others, or say the same of every resource.
LEFT_OUT = frozenset({"effective_labels", "terraform_labels", "project"})
Resources = Mapping[str, Mapping[str, Any]]


Plan = Mapping[str, Any]


def variables_by_name() -> dict[str, dict[str, Any]]:
    """Return spec name -> variables of the module."""
    found = {name: variables(spec_of(name), CLUSTER_ID, PUBLIC_KEY) for name in NAMES}
    found["kept"]["storage"] = {"name": "lasting-data", "disk": DISK}
    return found


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The module with the shared specs, the longest names, a KMS key, and the recorded cluster."""
    more = {
        "demo": recorded.variables_of_plan(),
        "long": with_long_names(variables_by_name()["everything"]),
    }
    zonal = {"tier": "ZONAL", "capacity_gib": 1024}  # the basic tiers take no key
    more["keyed"] = {**variables_by_name()["everything"], "filestore": zonal, "kms_key": KMS_KEY}
    return copies(tmp_path_factory.mktemp("golden"), variables_by_name() | more)


@pytest.fixture(scope="module")
def plan(module: Module) -> Plan:
    """Terraform's plan."""
    return module.planned()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The module that creates a storage, with a disk and a KMS key."""
    made = Module(
        tmp_path_factory.mktemp("storage"), source=data_folder("terraform") / "gcp-storage"
    )
    made.set(own_variables(spec_of("kept")) | {"kms_key": KMS_KEY})
    return made


@pytest.fixture(scope="module")
def disk(storage: Module) -> Mapping[str, Any]:
    """The planned disk of the storage."""
    resources = storage.planned()["planned_values"]["root_module"]["resources"]
    (found,) = (each for each in resources if each["type"] == "google_compute_disk")
    return found


def with_long_names(variables_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a cluster and a node with the longest names."""
    cluster = "c" * 20
    hosts = variables_by_name["hosts"]
    node = hosts["whole-train-1"]
    renamed = {f"{cluster}-ctl": hosts["whole-ctl"], f"{cluster}-{'p' * 20}-999": node}
    return {**variables_by_name, "cluster": cluster, "hosts": renamed, "bucket": None}


def is_golden(path: Path, text: str) -> Iterator[str]:
    """Yield the lines in which a file differs from the text. UPDATE_GOLDEN=1 writes the file."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    yield from unified_diff(
        path.read_text().splitlines(), text.splitlines(), path.name, "today", lineterm=""
    )


@pytest.mark.parametrize("name", NAMES)
def test_terraform_plan_equals_its_golden_file(plan: Plan, name: str) -> None:
    resources = planned(plan, name)
    spec = spec_of(name)
    known = {} if name == SIMPLEST else described(planned(plan, SIMPLEST), spec_of(SIMPLEST).name)
    text = rendered(
        described(resources, spec.name), {_NODE.sub("NODE", each): known[each] for each in known}
    )
    assert [*is_golden(GOLDEN / f"{name}.txt", text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_resources_are_in_the_project_of_the_spec(plan: Plan, name: str) -> None:
    """The golden files leave it out."""
    project = variables_by_name()[name]["project"]
    found = {each["project"] for each in planned(plan, name).values() if "project" in each}
    assert found == {project}


def test_longest_resource_names_fit_the_limits_of_google(plan: Plan) -> None:
    resources = planned(plan, "long")
    assert max(len(each.get("name") or "") for each in resources.values()) <= 63
    accounts = [each["account_id"] for each in resources.values() if "account_id" in each]
    # Google takes 6 to 30 characters.
    assert sorted(map(len, accounts)) == [29, 29]


def test_kms_key_of_the_user_encrypts_disks_filestore_and_bucket(
    plan: Plan, disk: Mapping[str, Any]
) -> None:
    resources = planned(plan, "keyed")
    kinds = (
        "google_compute_instance",
        "google_filestore_instance",
        "google_storage_bucket",
    )
    holders = [address for address in resources if re.search(rf"\b({'|'.join(kinds)})\.", address)]
    assert holders
    assert [address for address in holders if KMS_KEY not in str(resources[address])] == []
    assert KMS_KEY in str(disk)


def test_recorded_plan_equals_the_plan_of_terraform(plan: Plan) -> None:
    assert [*is_golden(recorded.PATH, recorded.as_file(changes(plan, "demo")))] == []


@pytest.mark.usefixtures("plan", "disk")
def test_fields_without_a_recording_are_in_the_discovery_document(
    module: Module, storage: Module
) -> None:
    """Recordings of what Google's provider sent for others have all fields of ours, or the file
    lists them.

    Each of them is in Google's discovery document, which says what it is.
    """
    given = module.cloud.given | storage.cloud.given
    assert given.keys() == REQUESTS.sent.keys() | REQUESTS.without["types"]
    lines = {field: said for kind in REQUESTS.sent for field, said in unrecorded(kind, given[kind])}
    text = "".join(f"{field}: {said}\n" for field, said in sorted(lines.items()))
    assert [*is_golden(GOLDEN / "unrecorded.txt", text)] == []


def rendered(
    resources: Mapping[str, Sequence[str]], simplest: Mapping[str, Sequence[str]] = {}
) -> str:
    """Return the resources as text. Resources that equal those of the simplest cluster are left
    out.
    """
    known = dict(simplest)
    blocks = []
    for address, lines in resources.items():
        general = _NODE.sub("NODE", address)
        before = known.setdefault(general, lines)
        gone, more = (
            [one for one in a if one not in b] for a, b in ((before, lines), (lines, before))
        )
        if before is lines:
            blocks.append(f"{address}\n" + "".join(f"  {line}\n" for line in lines))
        else:
            blocks.append(f"{address}: as known{', but' if gone or more else ''}\n")
            blocks += [*(f"  - {line}\n" for line in gone), *(f"  + {line}\n" for line in more)]
    return "".join(blocks)


_NODE = re.compile(r"CLUSTER-[a-z]+-[0-9]+")


def described(resources: Resources, cluster: str) -> dict[str, list[str]]:
    """Return address -> attributes, one per line, without the names of the cluster and the node."""

    def general(text: str) -> str:
        return re.sub(rf"\b{cluster}\b", "CLUSTER", text)

    return {
        general(address): [_NODE.sub("NODE", general(line)) for line in _lines(_short(values))]
        for address, values in resources.items()
    }


def _short(value: Any) -> Any:
    """Leave out empty values, and values that all resources have."""
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
