"""A folder on a cluster, and the place that it is brought to."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    folder = tmp_path / "remote folder's"
    folder.mkdir()
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return tmp_path / "work" / "tree"
