"""The preview of `up`: hosts with drift, and whether all hosts would be configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cluster import converge
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import ConfigurationRecord, _record, inputs_of
from clusterctl.cluster.phases import Drift
from clusterctl.errors import Notice
from clusterctl.hosts.probe import HostReport, NodeFacts
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of
from tests.unit.cluster.specs import TRAIN, spec_of

CTL = "d-ctl"
ONE = "d-train-1"
FACTS = NodeFacts(4, 1, 1, 4, 1, 8000)
FINE = {"unit munge": "running", "file /etc/munge/munge.key": "a1 400 1:1"}


def spec(max_time: str | None = None) -> ClusterSpec:
    return spec_of(
        TRAIN | ({"max_time": max_time} if max_time else {}), users=[{"name": "ada", "uid": 2001}]
    )


SPEC = spec()
INVENTORY = inventory_of(host_of(ONE, partition="train"))


def views(facts: NodeFacts = FACTS, **drifted: str) -> dict[str, HostReport]:
    marks = FINE | {f"unit {name}": mark for name, mark in drifted.items()}
    return {CTL: HostReport(FACTS, FINE), ONE: HostReport(facts, marks)}


def why_outdated(
    workspace: Workspace, now: dict[str, HostReport], spec: ClusterSpec = SPEC
) -> Notice | None:
    return converge.why_outdated(ClusterContext.of(spec, workspace=workspace), INVENTORY, now)


@pytest.fixture
def workspace(workspace: Workspace) -> Workspace:
    """The workspace of a cluster after a successful `up`."""
    rendered = inputs_of(spec(), INVENTORY, workspace, views())
    _record(workspace, ConfigurationRecord(inputs=rendered.inputs, marks={CTL: FINE, ONE: FINE}))
    return workspace


def test_unchanged_cluster_needs_nothing(workspace: Workspace) -> None:
    assert why_outdated(workspace, views()) is None
    assert not [*converge.drift_of(workspace, views())]


def test_host_that_drifted_is_named(workspace: Workspace) -> None:
    assert [*converge.drift_of(workspace, views(munge="stopped"))] == [
        Drift(ONE, "munge was stopped")
    ]


def test_host_that_was_never_configured_is_named(workspace: Workspace) -> None:
    noted = ConfigurationRecord.model_validate_json(workspace.configured.read_bytes())
    _record(workspace, ConfigurationRecord(inputs=noted.inputs, marks={CTL: FINE}))
    assert [drift.host for drift in converge.drift_of(workspace, views())] == [ONE]


def test_changed_spec_hardware_or_torn_up_outdate_all_hosts(workspace: Workspace) -> None:
    larger = views(NodeFacts(8, 1, 1, 8, 1, 8000))
    for found in (
        why_outdated(workspace, views(), spec("1h")),
        why_outdated(workspace, larger),
    ):
        assert found is not None
        assert found.code == "hosts-outdated"
    workspace.munge_key.unlink()
    assert why_outdated(workspace, views()) == found
    workspace.configured.unlink()
    assert why_outdated(workspace, views()) is converge.UNFINISHED


def test_preview_writes_nothing(workspace: Workspace) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}

    before = content()
    why_outdated(workspace, views(), spec("1h"))
    list(converge.drift_of(workspace, views(munge="stopped")))
    assert content() == before
