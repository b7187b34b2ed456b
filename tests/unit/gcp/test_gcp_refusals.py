"""Each refusal of Google has the right code, cause and fix, and hides no billed resource.

Real Terraform runs into more in tests/integration/gcp: test_gcp_faults.py, test_gcp_refusals.py and
test_gcp_verbs.py.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import CloudError, ProvisionError
from clusterctl.providers.gcp.api import Api, rules
from clusterctl.providers.gcp.apply import ProjectZone, diagnose
from clusterctl.providers.gcp.orphans import find_resources, remove_resources
from clusterctl.providers.gcp.terraform_run import Diagnostic
from tests.support.google.api import FACTS, PROJECT, Google
from tests.support.google.refusals import NUMBER, REFUSALS, TEXTS, Refusal, filled
from tests.support.messages import condition, refused
from tests.unit.gcp.module import labels

INSTANCE = "google_compute_instance"
WHERE = ProjectZone(PROJECT, "us-central1-a", "demo-ctl")
BOOK = [pytest.param(each, id=name) for name, each in REFUSALS.items()]


PATH = f"projects/{PROJECT}/zones/us-central1-a/instances/demo-train-1"
INSTANCE_SHOWN = "instance demo-train-1 in us-central1-a"


def test_every_refusal_has_source_and_date() -> None:
    whole = [
        each for each in REFUSALS.values() if not re.search("the part|of another", each.source)
    ]
    assert len(whole) >= 50
    assert all(
        each.source and each.date and (each.status or each.operation is not None)
        for each in REFUSALS.values()
    )
    assert {condition(each) for each in REFUSALS.values()} - {
        condition(rule) for rule in rules()
    } == set()


@pytest.mark.parametrize("refusal", BOOK)
def test_terraform_error_of_each_refusal_has_code_cause_and_fix(refusal: Refusal) -> None:
    finding = diagnose(Diagnostic("error", refusal.fill_message(FACTS)), WHERE)
    failure = finding.failure
    assert condition(failure) == condition(refusal)
    assert failure.cause.startswith(filled(refusal.cause, FACTS))
    assert filled(refusal.fix, FACTS) in failure.fix
    assert finding.transient == refusal.transient
    assert failure.retryable == (refusal.later or refusal.transient)


@pytest.mark.parametrize("name", ["permission", "quota_at_the_call", "unavailable"])
def test_api_error_has_the_cause_of_the_terraform_error(
    google: Google, api: Api, name: str
) -> None:
    refusal = REFUSALS[name]
    google.refuse("compute.instances.aggregatedList", refusal.name)
    with pytest.raises(CloudError) as caught:
        find_resources(api, "aaaaaa")
    (failure,) = caught.value.failures
    assert condition(failure) == condition(refusal)
    # That would say nothing of the cause.
    assert "refused to" not in caught.value.what
    assert str(caught.value.status) in caught.value.why


@pytest.mark.parametrize("name", ["permission", "stockout_plain", "unavailable"])
def test_undeleted_resource_is_shown_with_cost_and_retried(
    google: Google, api: Api, name: str
) -> None:
    refusal = REFUSALS[name]
    google.world.put(
        INSTANCE,
        PATH,
        zone="us-central1-a",
        project=PROJECT,
        labels=labels("demo", "aaaaaa"),
        machine_type="e2-standard-4",
    )
    google.refuse("compute.instances.delete", refusal.name)
    cause = filled(refusal.message, FACTS).split(".")[0]
    with refused("leftovers/orphans", ProvisionError, INSTANCE_SHOWN, "USD", cause):
        remove_resources(api, find_resources(api, "aaaaaa"))
    google.faults.clear()
    remove_resources(api, find_resources(api, "aaaaaa"))
    assert find_resources(api, "aaaaaa") == ()


PLACE = ProjectZone("my-project", "us-central1-a", "demo-ctl")
MESSAGES = tomllib.loads((Path(__file__).parent / "diagnoses.toml").read_text())["recorded"]


def at(host: str) -> str:
    if host == PLACE.controller:
        return f'module.controller.module.host.google_compute_instance.host["{host}"]'
    return f'module.nodes.module.partition["train"].google_compute_instance.host["{host}"]'


def diagnostic_of(recorded: Mapping[str, Any]) -> Diagnostic:
    summary = recorded.get("summary", recorded["text"])
    detail = recorded["text"] if "summary" in recorded else ""
    return Diagnostic("error", summary, detail, at("demo-train-2"))


@pytest.mark.parametrize(
    "recorded", MESSAGES, ids=lambda recorded: f"{recorded['code']}: {recorded['text'][:40]}"
)
def test_diagnose_recorded_messages(recorded: Mapping[str, Any]) -> None:
    finding = diagnose(diagnostic_of(recorded), PLACE)
    failure = finding.failure
    assert condition(failure) == condition(recorded)
    assert recorded["cause"] in failure.cause
    assert recorded["fix"] in failure.fix
    assert failure.host == "demo-train-2"
    assert finding.transient == recorded.get("transient", False)
    assert failure.retryable == (recorded.get("later", False) or finding.transient)
    assert not re.search(r"[{}]", failure.cause + failure.fix)


# Refusal -> what the real provider (version 8, on 2026-11-29) printed of it, in front of a stand-in for
# Google's APIs, and the facts in it.
WORDS: Mapping[str, Any] = json.loads(
    (Path(__file__).parent / "recorded" / "words.json").read_text()
)
WORDS_OF = {
    "project": "my-project",
    "number": NUMBER,
    "zone": "us-central1-a",
    "region": "us-central1",
    "email": "cheap-0123ab-n@my-project.iam.gserviceaccount.com",
}


@pytest.mark.parametrize("name", WORDS)
def test_double_prints_a_refusal_as_the_real_provider_does(name: str) -> None:
    """The real one adds the reason of the error, which some sources leave out."""
    printed = WORDS[name]["says"]
    said = " ".join(REFUSALS[name].fill_message(WORDS_OF | WORDS[name].get("facts", {})).split())
    assert said == (printed if REFUSALS[name].reason else re.sub(r" ?, \w+$", "", printed))
    assert condition(diagnose(Diagnostic("error", printed), WHERE).failure) == condition(
        REFUSALS[name]
    )


def test_every_pattern_of_a_rule_is_of_a_message_that_was_seen() -> None:
    """No rule is for an answer that nobody has seen."""
    login = " ".join(TEXTS["no_credentials"].values())
    seen = [login, *(refusal.fill_message(FACTS) for refusal in REFUSALS.values())]
    # As the API's client has it.
    seen += [f"Error {each.status}: {each.message} {each.details}" for each in REFUSALS.values()]
    seen += [f"{recorded.get('summary', '')}: {recorded['text']}" for recorded in MESSAGES]
    squeezed = [" ".join(text.split()) for text in seen]
    unseen = [
        pattern
        for rule in rules()
        for pattern in rule.match
        if not any(re.search(pattern, text) for text in squeezed)
    ]
    assert unseen == []


@pytest.mark.parametrize("name", sorted({*TEXTS["rules"]} - {"not_stopped"}))  # our mistake
def test_every_refusal_of_the_double_is_diagnosed(name: str) -> None:
    text = re.sub(r"\{(\w+)\}", r"\1", TEXTS["rules"][name])
    assert diagnose(Diagnostic("error", text), PLACE).failure.about != "terraform"


def test_explain_groups_hosts_with_the_same_cause() -> None:
    quota = (
        "Error waiting for instance to create: Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 2.0 in "
        "region x."
    )
    found = tuple(Diagnostic("error", quota, "", at(f"demo-train-{n}")) for n in range(3, 10))
    error = PLACE.explain("some resources could not be created or changed", found)
    assert re.findall(r"demo-train-\d", error.what) == [f"demo-train-{n}" for n in range(3, 8)]
    assert "and 2 more" in error.what
    assert error.what.count("NVIDIA_L4_GPUS") == 1
    assert [failure.host for failure in error.failures] == [f"demo-train-{n}" for n in range(3, 10)]
    assert {condition(failure) for failure in error.failures} == {"quota"}
    assert error.fix.count(error.failures[0].fix) == 1
    assert not error.transient


def test_diagnose_names_the_host_of_a_resource() -> None:
    assert diagnose(Diagnostic("error", "x", "", at("demo-ctl")), PLACE).failure.host == "demo-ctl"
    network = "module.network.google_compute_network.cluster[0]"
    assert diagnose(Diagnostic("error", "x", "", network), PLACE).failure.host is None


def test_transient_error_beside_a_lasting_one_is_not_retried() -> None:
    busy = Diagnostic(
        "error", "Error waiting for instance to create: an internal error has occurred"
    )
    full = Diagnostic("error", "Quota 'CPUS' exceeded.  Limit: 2.0 in region x.")
    assert PLACE.explain("x", (busy,)).transient
    assert not PLACE.explain("x", (busy, full)).transient


def test_disabled_api_is_retried_after_it_was_enabled() -> None:
    off = Diagnostic("error", REFUSALS["api_off_by_id"].fill_message({"project": PLACE.project}))
    assert not diagnose(off, PLACE).transient
    assert diagnose(off, replace(PLACE, enables_apis=True)).transient
