"""What tests share that start processes: a cluster that executables play, and a node of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.scheduler.session import Session
from tests.support.played.batch import Batch
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


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """A node that runs batch scripts."""
    return Batch(tmp_path)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A folder on a cluster."""
    (folder := tmp_path / "remote folder's").mkdir()
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The place that ``remote`` is brought to."""
    return tmp_path / "work" / "tree"
