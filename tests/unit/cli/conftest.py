"""The console script as it is installed, run in an empty folder with a state folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.verbs import Clusterctl


@pytest.fixture
def cli(tmp_path: Path) -> Clusterctl:
    """`cli("validate")`."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    return Clusterctl(tmp_path / "home", cwd, forked=True)
