"""A workspace of a cluster that is to be raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.state.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.create_secrets()
    return workspace
