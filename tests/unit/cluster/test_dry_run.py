"""What a dry run of `up` tells: a digest of what is approved later, and what can be used at most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster.dry_run import digest_of_plan, most_of_up
from clusterctl.cluster.phases import Drift
from clusterctl.cluster.plan import Plan
from clusterctl.cluster.up import UpOptions
from clusterctl.providers.base import HostChange, HostPlan
from clusterctl.spec.load import SpecDifference
from tests.unit.cluster.specs import spec_of

SPEC = spec_of({"name": "train", "nodes": 3})
MAKE = HostChange("d-train-1", "make", "g2-standard-8", usd_per_hour=0.75)
PLAN = Plan(HostPlan((MAKE,)))
PLAIN = UpOptions()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(HostPlan((replace(MAKE, action="remove"),))), PLAIN),
        (Plan(HostPlan((replace(MAKE, usd_per_hour=0.8),))), PLAIN),
        (Plan(HostPlan((MAKE,), ("a disk is made",))), PLAIN),
        (replace(PLAN, settings=(SpecDifference("name", "x"),)), PLAIN),
        (PLAN, UpOptions(discard=True)),
        (PLAN, UpOptions(reconfigure=True)),
        (PLAN, UpOptions(limit=("d-train-1",))),
        (PLAN, UpOptions(replaced=("d-train-1",))),
    ],
    ids=("host removed,price,disk,setting,discard,reconfigure,limit,replaced".split(",")),
)
def test_digest_counts_what_would_be_done(plan: Plan, options: UpOptions) -> None:
    first = digest_of_plan(SPEC, PLAN, PLAIN)
    assert digest_of_plan(SPEC, PLAN, PLAIN) == first
    assert digest_of_plan(SPEC, plan, options) != first


def test_digest_counts_the_spec_but_no_repairs() -> None:
    first = digest_of_plan(SPEC, PLAN, PLAIN)
    drift = replace(PLAN, drift=(Drift("d-ctl", "is off"),), notes=("a note",))
    assert digest_of_plan(SPEC, drift, PLAIN) == first
    assert digest_of_plan(spec_of({"name": "train", "nodes": 2}), PLAN, PLAIN) != first


def test_up_of_a_cluster_that_costs_money_is_unbounded() -> None:
    assert most_of_up(Plan(HostPlan((replace(MAKE, usd_per_hour=None),))), SPEC).usd == 0.0
    priced: Any = SPEC
    assert most_of_up(PLAN, priced).usd is None
