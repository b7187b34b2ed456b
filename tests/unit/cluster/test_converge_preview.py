"""The preview of `up`: hosts with drift, and whether all hosts would be configured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.cluster import converge
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import ClusterRecord, inputs_of
from clusterctl.cluster.phases import Drift
from clusterctl.errors import Notice
from clusterctl.hosts.probe import HostReport, NodeFacts, Wanted
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of
from tests.unit.cluster.specs import TRAIN, spec_of

CTL = "d-ctl"
ONE = "d-train-1"
FACTS = NodeFacts(4, 1, 1, 4, 1, 8000)
KEY = "file /etc/munge/munge.key"
WRITTEN = {KEY: "a1 400 1:1"}
FINE = {"unit munge": "running", **WRITTEN}
Views = dict[str, HostReport]


def spec(max_time: str | None = None) -> ClusterSpec:
    return spec_of(
        TRAIN | ({"max_time": max_time} if max_time else {}), users=[{"name": "ada", "uid": 2001}]
    )


SPEC = spec()
INVENTORY = inventory_of(host_of(ONE, partition="train"))


def views(facts: NodeFacts = FACTS, *, inputs: str | None = None, **drifted: str) -> Views:
    """Return the reports of hosts that an `up` with these inputs has configured. Default: none has."""
    marks = FINE | {f"unit {name}": mark for name, mark in drifted.items()}
    cluster = ClusterRecord(inputs=inputs or "", by="bob@lab").model_dump(mode="json")
    written = {} if inputs is None else WRITTEN
    return {
        CTL: HostReport(FACTS, FINE, wanted=Wanted(marks=written, cluster=cluster)),
        ONE: HostReport(facts, marks, wanted=Wanted(marks=written)),
    }


def why_outdated(workspace: Workspace, now: Views, spec: ClusterSpec = SPEC) -> Notice | None:
    return converge.why_outdated(ClusterContext.of(spec, workspace=workspace), INVENTORY, now)


@pytest.fixture
def inputs(workspace: Workspace) -> str:
    """The inputs of a successful `up`."""
    return inputs_of(spec(), INVENTORY, workspace, views()).inputs


def drift(now: Views) -> list[Drift]:
    return [*converge.drift_of(INVENTORY, now)]


def test_unchanged_cluster_needs_nothing(workspace: Workspace, inputs: str) -> None:
    assert why_outdated(workspace, views(inputs=inputs)) is None
    assert drift(views(inputs=inputs)) == []


def test_host_that_drifted_is_named(inputs: str) -> None:
    assert drift(views(inputs=inputs, munge="stopped")) == [Drift(ONE, "munge was stopped")]


def test_host_that_was_never_configured_is_named(inputs: str) -> None:
    now = views(inputs=inputs)
    now[ONE] = replace(now[ONE], wanted=Wanted())
    assert [each.host for each in drift(now)] == [ONE]


def test_file_that_was_changed_while_up_ran_is_named(inputs: str) -> None:
    """The record has what was to be written, not what a probe found afterwards."""
    now = views(inputs=inputs)
    now[CTL] = replace(now[CTL], checksums=FINE | {KEY: "b2 400 1:1"})
    assert [each.host for each in drift(now)] == [CTL]


def test_changed_spec_hardware_or_torn_up_outdate_all_hosts(
    workspace: Workspace, inputs: str
) -> None:
    larger = views(NodeFacts(8, 1, 1, 8, 1, 8000), inputs=inputs)
    for found in (
        why_outdated(workspace, views(inputs=inputs), spec("1h")),
        why_outdated(workspace, larger),
    ):
        assert found is not None
        assert found.code == "hosts-outdated"
        assert "bob@lab" in str(found)
    workspace.munge_key.unlink()
    assert why_outdated(workspace, views(inputs=inputs)) == found
    assert why_outdated(workspace, views()) is converge.UNFINISHED


def test_preview_writes_nothing(workspace: Workspace, inputs: str) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}

    before = content()
    why_outdated(workspace, views(inputs=inputs), spec("1h"))
    drift(views(inputs=inputs, munge="stopped"))
    assert content() == before
