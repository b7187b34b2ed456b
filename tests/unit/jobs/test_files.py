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
from tests.support.here import LocalTransport


def test_put_leaves_out_the_keys_of_clusterctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project, home = tmp_path / "project", tmp_path / "home"
    state = project / "state"
    for file in (project / "data.csv", state / "demo" / "id_ed25519", project / "state.csv"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    home.mkdir()
    monkeypatch.setenv("CLUSTERCTL_HOME", str(state))

    @contextmanager
    def session(chosen: ChosenCluster) -> Iterator[SimpleNamespace]:
        ledger = SimpleNamespace(workspace=Workspace(tmp_path / "workspace"))
        yield SimpleNamespace(
            transport=LocalTransport(),
            facts=SimpleNamespace(is_foreign=False),
            ledger=ledger,
        )

    monkeypatch.setattr(files, "open_session", session)
    done = files.put(ChosenCluster(), [str(project), str(home)])
    assert {path.name for path in (home / "project").iterdir()} == {"data.csv", "state.csv"}
    assert done.own == (state,)
    assert done.sent.files == 2
