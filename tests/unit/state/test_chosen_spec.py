"""Tests of the spec that a command reads, if an agent has called the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.spec.load import parse_spec
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import reject_own_hosts, spec_of
from clusterctl.state.workspace import Workspace
from clusterctl.util.confine import Confinement, LimitError
from tests.support.messages import refused

SPEC = (
    "version: 1\nname: lab\npartitions: [{{name: train, hosts: n1}}]\n"
    "provider: {{type: onprem, controller: head, hosts: {{head: 10.0.0.1, n1: {}}}}}\n"
)
LOCAL = "version: 1\nname: lab\nprovider: {type: local}\npartitions: [{name: train, nodes: 1}]\n"


def confine(monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: str = "") -> None:
    for name, value in Confinement((str(folder),), cluster=cluster).environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("applied", ["", "10.0.0.2", "10.0.0.9"])
def test_agent_reaches_only_hosts_that_the_user_has_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, applied: str
) -> None:
    """A name in `clusters` says nothing about the hosts that a spec of this name has."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    workspace = Workspace.of("lab")
    workspace.root.mkdir()
    if applied:
        workspace.spec.write_text(SPEC.format(applied))
    spec = parse_spec(SPEC.format("10.0.0.2"), "spec")
    # The user may reach any.
    reject_own_hosts(spec)
    confine(monkeypatch, tmp_path)
    reject_own_hosts(parse_spec(LOCAL, "spec"))
    if applied == "10.0.0.2":
        reject_own_hosts(spec)
        return
    with refused("agent-hosts", LimitError):
        reject_own_hosts(spec)


def test_agent_command_is_about_the_cluster_for_which_limits_were_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may replace the spec between the check and the command."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    file = tmp_path / "cluster.yaml"
    file.write_text(SPEC.format("10.0.0.2"))
    chosen = ChosenCluster(file)
    for cluster in ("", "lab"):
        confine(monkeypatch, tmp_path, cluster)
        assert chosen.workspace().root.name == spec_of(chosen).name == "lab"
    confine(monkeypatch, tmp_path, "local")
    with refused("agent-cluster-changed"):
        chosen.workspace()
    with refused("agent-cluster-changed"):
        spec_of(chosen)
