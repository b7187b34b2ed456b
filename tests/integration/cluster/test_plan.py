"""A plan with facts that it asks of hosts over ssh."""

from __future__ import annotations

import pytest

from clusterctl.cluster.context import ClusterContext
from clusterctl.hosts.probe import HostReport, NodeFacts
from clusterctl.providers.base import HostChange
from clusterctl.state.workspace import Workspace
from tests.support.inventories import inventory_of
from tests.unit.cluster.test_plan import Stub, look


def test_plan_names_hosts_that_do_not_answer(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.cluster.plan.SHORT_PATIENCE_S", 0.0)
    workspace.inventory.write_text(inventory_of().text)
    workspace.ssh_config.write_text(
        f"Host *\n  HostName 127.0.0.1\n  Port 9\n  IdentityFile {workspace.key}\n"
    )
    workspace.known_hosts.write_text("")
    found = look(workspace, Stub((HostChange("d-ctl", "keep", "the controller"),)))
    assert found.settings[0].key == "spec"
    (drift,) = found.drift
    assert drift.host == "d-ctl"
    assert "does not answer" in drift.what


def test_slurm_without_control_groups_gives_a_note(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.inventory.write_text(inventory_of("d-train-1").text)
    reports = {"d-train-1": HostReport(NodeFacts(4, 1, 1, 4, 1, 64000, cgroups=False), {})}
    monkeypatch.setattr(ClusterContext, "probe", lambda *_, **__: reports)
    monkeypatch.setattr("clusterctl.cluster.plan._drift_of_services", lambda *_: ())
    found = look(workspace, Stub((HostChange("d-ctl", "keep", "the controller"),)))
    assert [
        note for note in found.notes if note.startswith("d-train-1: ") and "control groups" in note
    ]
