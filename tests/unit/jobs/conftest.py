"""A node that runs batch scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.played.batch import Batch


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)
