"""What unit tests share: golden files, a workspace, a cluster that executables play, and a node of
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterctl.scheduler.session import Session
from clusterctl.state.workspace import Workspace
from tests.support.played.batch import Batch
from tests.support.played.cluster import PlayedCluster


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Asserts that a text is what the file of that name in the folder `golden` beside the test
    holds.

    `UPDATE_GOLDEN=1 pytest ...` writes them anew; look at the diff before you commit it.
    """

    def same(name: str, text: str) -> None:
        path = request.path.parent / "golden" / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; UPDATE_GOLDEN=1 writes it anew"

    return same


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
def workspace(tmp_path: Path) -> Workspace:
    """A workspace of a cluster that is to be raised."""
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.create_secrets()
    return workspace


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A folder on a cluster."""
    (folder := tmp_path / "remote folder's").mkdir()
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The place that ``remote`` is brought to."""
    return tmp_path / "work" / "tree"
