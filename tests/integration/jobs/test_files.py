"""What `put` copies to the cluster of a folder that the user names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterctl.jobs import files
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.workspace import Workspace
from tests.support.local_transport import LocalTransport


@pytest.fixture(autouse=True)
def _cluster_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is the cluster."""

    @contextmanager
    def session(chosen: ChosenCluster) -> Iterator[SimpleNamespace]:
        ledger = SimpleNamespace(workspace=Workspace(tmp_path / "workspace"))
        yield SimpleNamespace(
            transport=LocalTransport(),
            site=SimpleNamespace(upload_folder="."),
            ledger=ledger,
        )

    monkeypatch.setattr(files, "open_session", session)


def test_put_leaves_out_the_keys_of_clusterctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    home = tmp_path / "home"
    state = project / "state"
    for file in (project / "data.csv", state / "demo" / "id_ed25519", project / "state.csv"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    home.mkdir()
    monkeypatch.setenv("CLUSTERCTL_HOME", str(state))
    done = files.put(ChosenCluster(), [str(project), str(home)])
    assert {path.name for path in (home / "project").iterdir()} == {"data.csv", "state.csv"}
    assert done.own == (state,)
    assert done.sent.files == 2


def test_put_prints_the_path_on_the_cluster(tmp_path: Path) -> None:
    """A folder has a place of its own below the target, also if the target is new."""
    project = tmp_path / "a3"
    target = tmp_path / "home" / "het"
    project.mkdir()
    for name in ("x", "y"):
        (project / name).touch()
    assert files.put(ChosenCluster(), [str(project), str(target)]).place == f"{target}/a3"
    assert (target / "a3" / "x").exists()
    for paths in ([project / "x"], [project, project / "x"]):
        assert files.put(ChosenCluster(), [*map(str, paths), str(target)]).place == str(target)
