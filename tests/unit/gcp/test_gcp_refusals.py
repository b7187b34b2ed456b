"""The rule book of Google's refusals: each ends in the right first line, and nothing that bills is lost.

Real Terraform runs into a few in test_gcp_faults.py and test_gcp_verbs.py, in the sweep here into more.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from clusterctl.errors import CloudError, ProvisionError, TerraformError
from clusterctl.providers.gcp.api import Api, rules
from clusterctl.providers.gcp.apply import Place, diagnose
from clusterctl.providers.gcp.orphans import find_resources, remove_resources
from clusterctl.providers.gcp.terraform_run import Diagnostic
from tests.support.google.api import FACTS, PROJECT, Google
from tests.support.google.refusals import REFUSALS, Refusal, filled
from tests.support.messages import refused
from tests.unit.gcp.module import labels
from tests.unit.gcp.terraformed import Terraformed

INSTANCE = "google_compute_instance"
WHERE = Place(PROJECT, "us-central1-a", "demo-ctl")
BOOK = [pytest.param(each, id=name) for name, each in REFUSALS.items()]


def played(*first: str) -> list[ParameterSet]:
    """The book, of which `make test` plays these alone."""
    return [
        pytest.param(each, id=name, marks=() if name in first else pytest.mark.sweep)
        for name, each in REFUSALS.items()
    ]


PATH = f"projects/{PROJECT}/zones/us-central1-a/instances/demo-train-1"
INSTANCE_SHOWN = "instance demo-train-1 in us-central1-a"


def test_the_book_says_where_each_was_read() -> None:
    whole = [each for each in REFUSALS.values() if not re.search("before sources|the part", each.source)]
    assert len(whole) >= 50
    assert all(
        each.source and each.date and (each.status or each.operation is not None)
        for each in REFUSALS.values()
    )
    assert {each.code for each in REFUSALS.values()} - {rule.code for rule in rules()} == set()


@pytest.mark.parametrize("refusal", BOOK)
def test_what_terraform_is_told_ends_in_the_right_first_line(refusal: Refusal) -> None:
    finding = diagnose(Diagnostic("error", refusal.said(FACTS)), WHERE)
    failure = finding.failure
    assert failure.code == refusal.code
    assert failure.cause.startswith(filled(refusal.cause, FACTS))
    assert filled(refusal.fix, FACTS) in failure.fix
    assert finding.transient == refusal.transient
    assert failure.retryable == (refusal.later or refusal.transient)


@pytest.mark.parametrize("refusal", played("permission", "quota_at_the_call", "unavailable"))
def test_what_we_are_told_ourselves_has_the_same_cause_and_is_not_taken_for_nothing(
    google: Google, api: Api, refusal: Refusal
) -> None:
    if refusal.operation is not None:
        return  # no answer to a call
    google.refuse("compute.instances.aggregatedList", refusal.name)
    with pytest.raises(CloudError) as caught:
        find_resources(api, "aaaaaa")
    (failure,) = caught.value.failures
    assert failure.code == refusal.code
    # That would say nothing of the cause.
    assert "refused to" not in caught.value.what
    assert str(caught.value.status) in caught.value.why


@pytest.mark.parametrize("refusal", played("permission", "stockout_plain", "unavailable"))
def test_what_is_not_deleted_is_named_with_what_it_costs_and_goes_the_next_time(
    google: Google, api: Api, refusal: Refusal
) -> None:
    google.world.put(
        INSTANCE,
        PATH,
        zone="us-central1-a",
        project=PROJECT,
        labels=labels("demo", "aaaaaa"),
        machine_type="e2-standard-4",
    )
    google.refuse("compute.instances.delete", refusal.name)
    if refusal.status == 404:
        return  # gone
    cause = filled(refusal.message, FACTS).split(".")[0]
    with refused("orphans-not-deleted", ProvisionError, INSTANCE_SHOWN, "USD", cause):
        remove_resources(api, find_resources(api, "aaaaaa"), report=lambda _: None)
    google.faults.clear()
    remove_resources(api, find_resources(api, "aaaaaa"), report=lambda _: None)
    assert find_resources(api, "aaaaaa") == ()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terraformed:
    return Terraformed(tmp_path, monkeypatch.setenv)


@pytest.mark.sweep
def test_what_passes_is_waited_for_wherever_it_comes(cluster: Terraformed) -> None:
    for name, each in REFUSALS.items():
        if each.transient and each.on == "create" and each.type != "google_filestore_instance":
            cluster.cloud.fail(name, of=each.type, times=1)
    cluster.up()
    assert set(cluster.cloud.instances) == {"demo-ctl", "demo-train-1", "demo-train-2"}
    assert cluster.waited
    assert cluster.terraform.plan().is_empty
    cluster.down()
    assert cluster.cloud.resources() == {}


@pytest.mark.sweep
def test_what_can_not_be_deleted_is_said_and_goes_once_it_can(cluster: Terraformed) -> None:
    names = ["protected", "subnetwork_in_use", "network_in_use"]  # in the order in which they are deleted
    lasting = {name for name, each in REFUSALS.items() if each.on == "delete"}
    assert lasting - {"bucket_not_empty"} == set(names)
    cluster.nodes(1)
    cluster.up()
    for name in names:
        cluster.cloud.fail(name, of=REFUSALS[name].type, on="delete")
        with refused(REFUSALS[name].code, TerraformError):
            cluster.down()
        assert cluster.cloud.resources(REFUSALS[name].type)
        cluster.cloud.heal()
    cluster.down()
    assert cluster.cloud.resources() == {}
