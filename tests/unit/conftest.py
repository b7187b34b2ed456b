"""What unit tests share: a cluster that executables play."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clusterctl.scheduler.session import Session
from tests.support.played.cluster import PlayedCluster


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PlayedCluster]:
    """A cluster whose jobs really run, in real shells and a real folder; only Slurm is played."""
    played = PlayedCluster(tmp_path_factory.mktemp("cluster") / "root")
    for name, value in played.environment().items():
        monkeypatch.setenv(name, value)
    yield played
    played.end_jobs()


@pytest.fixture
def session(cluster: PlayedCluster) -> Session:
    """A session with it."""
    return cluster.session()
