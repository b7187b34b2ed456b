"""`down` of clusters that were never created, run as a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cluster import down
from clusterctl.cluster.down import DownOptions
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.errors import (
    UsageError,
)
from clusterctl.state.workspace import Workspace
from tests.support.messages import codes, refused
from tests.support.verbs import Clusterctl


@pytest.mark.parametrize("access", [True, False])
def test_down_of_a_cluster_never_created_claims_no_verification(
    tmp_path: Path, *, access: bool
) -> None:
    cli = Clusterctl(tmp_path / "home", cwd=tmp_path)
    workspace = Workspace(cli.home / "d")
    workspace.create()
    if access:
        workspace.access_config.touch()
    with refused("not-found/name", UsageError, "zzz"):
        down.down(PhaseRunner(workspace=workspace), DownOptions(gone=["zzz"]))
    said = cli("--cluster", "d", "down", "--yes").stdout
    assert said.startswith("cluster 'd' is down; ")
    assert "verified" not in said
    assert not workspace.root.exists()
    assert codes(cli("-o", "json", "--cluster", "d", "down", "--yes", rc=2)) == [
        "not-found/cluster"
    ]
