"""Jobs against real shells, a real folder and executables that play Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.slurm.access import Session
from tests.unit.slurm.cluster import PlayedCluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedCluster]:
    played = PlayedCluster(tmp_path / "cluster")
    for name, value in played.environment().items():
        monkeypatch.setenv(name, value)
    yield played
    played.end_jobs()


@pytest.fixture
def session(cluster: PlayedCluster) -> Session:
    return cluster.session()
