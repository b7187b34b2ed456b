"""Test of `detach` with a damaged spec."""

from __future__ import annotations

from pathlib import Path

from clusterctl.cluster.detach import DetachOptions, detach
from clusterctl.errors import UsageError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import HERE, write_login_files
from tests.support.messages import refused


def test_detach_keeps_all_files_of_a_workspace_with_a_damaged_spec(tmp_path: Path) -> None:
    """Without the spec, the folder on the cluster is unknown."""
    workspace = Workspace(tmp_path / "campus")
    workspace.create()
    write_login_files(HERE, workspace)
    workspace.spec.write_text("version: 1\nname: campus\nprovider: {type: existing")
    workspace.jobs.touch()
    before = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    with refused("record-damaged/spec", UsageError):
        detach(workspace, DetachOptions())
    assert {path: path.read_bytes() for path in before if path.exists()} == before
