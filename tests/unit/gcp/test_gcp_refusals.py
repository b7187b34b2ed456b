"""The rule book of Google's refusals: each ends in the right first line, and nothing that bills is lost.

Real Terraform runs into a few in test_gcp_faults.py and test_gcp_verbs.py, in the sweep here into all.
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
from clusterctl.util.progress import Clock
from tests.support.google.api import PROJECT, Google
from tests.support.google.refusals import REFUSALS, Refusal
from tests.support.google.terraformed import PLACE, Terraformed
from tests.support.google.world import labels
from tests.unit.gcp.clusters import removed

INSTANCE = "google_compute_instance"
FACTS = {
    **{"project": PROJECT, "number": "123456789012", "zone": "us-central1-a", "region": "us-central1"},
    **{"id": f"projects/{PROJECT}/zones/us-central1-a/instances/x", "name": "x", "email": "x@example.com"},
    **{"metric": "CPUS"},
}
WHERE = Place(PROJECT, "us-central1-a", "demo-ctl")
BOOK = [pytest.param(each, id=name) for name, each in REFUSALS.items()]


def played(*first: str) -> list[ParameterSet]:
    """The book, of which `make test` plays these alone."""
    return [
        pytest.param(each, id=name, marks=() if name in first else pytest.mark.sweep)
        for name, each in REFUSALS.items()
    ]


OF_NODES = {name: each for name, each in REFUSALS.items() if each.type == INSTANCE and each.on == "create"}
PATH = f"projects/{PROJECT}/zones/us-central1-a/instances/demo-train-1"


@pytest.fixture
def api(google: Google) -> Api:
    naps: list[float] = []
    return Api(PROJECT, clock=Clock(now=lambda: sum(naps), sleep=naps.append))


def filled(text: str) -> str:
    for name, value in FACTS.items():
        text = text.replace(f"${name}", value)
    return text


def test_the_book_says_where_each_was_read() -> None:
    whole = [each for each in REFUSALS.values() if not re.search("before sources|the part", each.source)]
    assert len(whole) >= 50, "bodies that were read whole, at a place that is named"
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
    assert failure.cause.startswith(filled(refusal.cause))
    assert filled(refusal.fix) in failure.fix
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
    assert "refused to" not in caught.value.what, "which says nothing of the cause"
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
    with pytest.raises(ProvisionError, match="1 of 1 things of the cluster could not be deleted") as caught:
        remove_resources(api, find_resources(api, "aaaaaa"), report=lambda _: None)
    assert "instance demo-train-1 in us-central1-a" in caught.value.why
    assert "USD" in caught.value.why
    assert filled(refusal.message).split(".")[0] in caught.value.why
    google.faults.clear()
    remove_resources(api, find_resources(api, "aaaaaa"), report=lambda _: None)
    assert find_resources(api, "aaaaaa") == ()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terraformed:
    return Terraformed(tmp_path, monkeypatch.setenv)


@pytest.mark.sweep
def test_each_node_that_is_refused_says_why_and_down_leaves_nothing(cluster: Terraformed) -> None:
    lasting = [name for name, each in OF_NODES.items() if not each.transient and name != "name_taken"]
    cluster.nodes(len(lasting))
    for number, name in enumerate(lasting, start=1):
        cluster.cloud.fail(name, name=f"demo-train-{number}")
    with pytest.raises(TerraformError) as caught:
        cluster.up()
    told = {failure.host: failure for failure in caught.value.failures}
    assert {host: failure.code for host, failure in told.items()} == {
        f"demo-train-{number}": REFUSALS[name].code for number, name in enumerate(lasting, start=1)
    }
    assert len(told) >= 20
    assert cluster.waited == []
    made = {f"demo-train-{n}" for n, name in enumerate(lasting, start=1) if OF_NODES[name].made}
    assert set(cluster.cloud.instances) == {"demo-ctl"} | made
    removed(cluster)


@pytest.mark.sweep
def test_what_passes_is_waited_for_wherever_it_comes(cluster: Terraformed) -> None:
    for name, each in REFUSALS.items():
        if each.transient and each.on == "create" and each.type != "google_filestore_instance":
            cluster.cloud.fail(name, of=each.type, times=1)
    cluster.up()
    assert set(cluster.cloud.instances) == {"demo-ctl", "demo-train-1", "demo-train-2"}
    assert cluster.waited
    assert cluster.terraform.plan().is_empty
    removed(cluster)


@pytest.mark.sweep
def test_what_is_refused_beside_the_nodes_is_said_and_leaves_nothing(cluster: Terraformed) -> None:
    """Each reason once, of whatever it comes upon: services first, then accounts, networks and storage."""
    beside = {name: each for name, each in REFUSALS.items() if each.type != INSTANCE and each.on == "create"}
    lasting = [name for name, each in beside.items() if not each.transient]
    cluster.nodes(
        1, more="bucket: {name: results, create: true}, filestore: {tier: BASIC_SSD, capacity: 2560GiB}"
    )
    for name in lasting:
        cluster.cloud.fail(name, of=REFUSALS[name].type, times=1)
    told: list[str] = []
    while not all(fault["played"] for fault in cluster.cloud.store.read()["faults"]):
        with pytest.raises(TerraformError) as caught:
            cluster.up()
        told += [failure.cause for failure in caught.value.failures]
    causes = {name: filled(REFUSALS[name].cause).replace(PROJECT, PLACE.project) for name in lasting}
    assert [name for name, cause in causes.items() if not any(cause in one for one in told)] == []
    assert len(told) == len(lasting)
    assert cluster.waited == []
    removed(cluster)


@pytest.mark.sweep
def test_what_can_not_be_deleted_is_said_and_goes_once_it_can(cluster: Terraformed) -> None:
    names = ["protected", "subnetwork_in_use", "network_in_use"]  # in the order in which they are deleted
    lasting = {name for name, each in REFUSALS.items() if each.on == "delete"}
    assert lasting - {"bucket_not_empty"} == set(names)
    cluster.nodes(1)
    cluster.up()
    for name in names:
        cluster.cloud.fail(name, of=REFUSALS[name].type, on="delete")
        with pytest.raises(TerraformError, match="not all could be removed") as caught:
            cluster.down()
        assert REFUSALS[name].code in {failure.code for failure in caught.value.failures}
        assert cluster.cloud.resources(REFUSALS[name].type)
        cluster.cloud.heal()
    cluster.down()
    assert cluster.cloud.resources() == {}


@pytest.mark.sweep
def test_labels_that_somebody_else_changes_meanwhile_are_set_again(cluster: Terraformed) -> None:
    cluster.nodes(1)
    cluster.up()
    for each in ("demo-ctl", "demo-train-1"):
        cluster.cloud.fail("labels_fingerprint", name=each, on="update", times=1)
    path = cluster.folder / "clusterctl.auto.tfvars.json"
    path.write_text(path.read_text().replace('"labels": {}', '"labels": {"team": "vision"}'))
    cluster.up()
    assert cluster.cloud.instances["demo-train-1"]["effective_labels"]["team"] == "vision"
    assert cluster.waited == [5]
    assert PLACE.project == "my-project"
