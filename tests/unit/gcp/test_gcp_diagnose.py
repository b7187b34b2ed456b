"""What Google's provider says, and what a user is told."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.api import rules
from clusterctl.providers.gcp.apply import Place, diagnose, explaining
from clusterctl.providers.gcp.terraform_run import Diagnostic
from tests.support.google.provider.faults import TEXTS
from tests.support.google.refusals import REFUSALS

PLACE = Place("my-project", "us-central1-a", "demo-ctl")
SAID = tomllib.loads((Path(__file__).parent / "diagnoses.toml").read_text())["said"]


def at(host: str) -> str:
    if host == PLACE.controller:
        return "module.controller.module.host.google_compute_instance.host"
    return f'module.nodes.module.node["{host}"].google_compute_instance.host'


def told(said: Mapping[str, Any]) -> Diagnostic:
    summary, detail = said.get("summary", said["text"]), said["text"] if "summary" in said else ""
    return Diagnostic("error", summary, detail, at("demo-train-2"))


@pytest.mark.parametrize("said", SAID, ids=lambda said: f"{said['code']}: {said['text'][:40]}")
def test_what_is_said_is_understood(said: Mapping[str, Any]) -> None:
    finding = diagnose(told(said), PLACE)
    failure = finding.failure
    assert failure.code == said["code"]
    assert said["cause"] in failure.cause
    assert said["fix"] in failure.fix
    assert failure.host == "demo-train-2"
    assert finding.transient == said.get("transient", False)
    assert failure.retryable == (said.get("later", False) or finding.transient)
    assert finding.import_id == said.get("taken", "")
    assert not re.search(r"[{}]", failure.cause + failure.fix)


def test_every_rule_has_a_text_that_it_is_for() -> None:
    rare = {
        "lock-file",
        "state-unwritable",
        "preempted",
        "interrupted",
        "network-missing",
        "service-perimeter",
    }
    known = {said["code"] for said in SAID} | {refusal.code for refusal in REFUSALS.values()}
    assert {rule.code for rule in rules()} - known == rare


@pytest.mark.parametrize("name", sorted({*TEXTS["rules"]} - {"not_stopped"}))  # our mistake
def test_every_rule_that_the_stand_in_plays_is_understood(name: str) -> None:
    text = re.sub(r"\{(\w+)\}", r"\1", TEXTS["rules"][name])
    assert diagnose(Diagnostic("error", text), PLACE).failure.code != "terraform"


def test_hosts_with_one_cause_are_told_in_one_breath() -> None:
    quota = "Error waiting for instance to create: Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 2.0 in region x."
    found = tuple(Diagnostic("error", quota, "", at(f"demo-train-{n}")) for n in range(3, 10))
    error = explaining(PLACE)("not all could be made", found)
    assert error.what == (
        "not all could be made: "
        "demo-train-3, demo-train-4, demo-train-5, demo-train-6, demo-train-7 and 2 more: "
        "the quota NVIDIA_L4_GPUS of project my-project is used up (limit: 2)"
    )
    assert [failure.host for failure in error.failures] == [f"demo-train-{n}" for n in range(3, 10)]
    assert {failure.code for failure in error.failures} == {"quota"}
    assert error.fix.count("ask for more") == 1
    assert not error.transient


def test_the_controller_is_a_host_too_and_a_network_is_none() -> None:
    assert diagnose(Diagnostic("error", "x", "", at("demo-ctl")), PLACE).failure.host == "demo-ctl"
    network = "module.network.google_compute_network.cluster[0]"
    assert diagnose(Diagnostic("error", "x", "", network), PLACE).failure.host is None


def test_what_passes_and_what_does_not_is_not_waited_for_together() -> None:
    busy = Diagnostic("error", "googleapi: Error 503: backendError")
    full = Diagnostic("error", "Quota 'CPUS' exceeded.  Limit: 2.0 in region x.")
    assert explaining(PLACE)("x", (busy,)).transient
    assert not explaining(PLACE)("x", (busy, full)).transient


def test_an_api_that_was_just_switched_on_is_waited_for() -> None:
    off = Diagnostic("error", REFUSALS["api_off_by_id"].said({"project": PLACE.project}))
    assert not diagnose(off, PLACE).transient
    assert diagnose(off, replace(PLACE, enables_apis=True)).transient
