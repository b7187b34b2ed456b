"""`detach` after an `attach` that failed or was killed: it removes what `attach` left, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cluster.detach import DetachOptions, detach
from clusterctl.errors import OnlyCopyError, TransportError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import HERE, write_login_files

SPEC = """\
version: 1
name: campus
provider: {{type: existing, login: ".", folder: {folder}}}
partitions: [{{name: short, nodes: 2}}]
"""


@pytest.fixture
def unfinished(tmp_path: Path) -> Workspace:
    """A workspace without hosts.json. Its folder is on this machine, which is the login node."""
    workspace = Workspace(tmp_path / "campus")
    workspace.create()
    write_login_files(HERE, workspace)
    workspace.spec.write_text(SPEC.format(folder=tmp_path / "there/ours"))
    (tmp_path / "there").mkdir()
    return workspace


def fill(workspace: Workspace, cluster_id: str, *names: str) -> Path:
    folder = workspace.root.parent / "there/ours"
    folder.mkdir()
    (folder / ".clusterctl-cluster").write_text(f"{cluster_id}\n1\n")
    for name in names:
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize("names", [None, (), ("environments", "store")])
def test_unfinished_attach_is_removed(unfinished: Workspace, names: tuple[str, ...] | None) -> None:
    if names is not None:
        fill(unfinished, unfinished.cluster_id(), *names)
    assert {entry.name for entry in detach(unfinished, DetachOptions(dry_run=True)).entries} == {
        *(names or ())
    }
    detach(unfinished, DetachOptions())
    assert not unfinished.root.exists()
    assert list((unfinished.root.parent / "there").iterdir()) == []


def test_unfinished_attach_leaves_the_folder_of_another(unfinished: Workspace) -> None:
    folder = fill(unfinished, "c3d4", "jobs")
    assert detach(unfinished, DetachOptions()).folder == ""
    assert (folder / "jobs").is_dir()
    assert not unfinished.root.exists()


def test_unfinished_attach_keeps_files_that_others_need(unfinished: Workspace) -> None:
    folder = fill(unfinished, unfinished.cluster_id(), "jobs")
    with pytest.raises(OnlyCopyError):
        detach(unfinished, DetachOptions())
    assert (folder / "jobs").is_dir()
    detach(unfinished, DetachOptions(discard=True))
    assert not folder.exists()


def test_forget_needs_no_login_and_says_what_stays(unfinished: Workspace) -> None:
    folder = fill(unfinished, unfinished.cluster_id(), "jobs")
    spec = unfinished.spec.read_text().replace('login: "."', "login: closed.invalid")
    unfinished.spec.write_text(spec)
    write_login_files("closed.invalid", unfinished)
    with pytest.raises(TransportError) as refusal:
        detach(unfinished, DetachOptions(discard=True))
    assert "--forget" in refusal.value.fix
    assert unfinished.root.exists()
    result = detach(unfinished, DetachOptions(forget=True))
    assert result.left == (f"closed.invalid:{folder}",)
    assert (folder / "jobs").is_dir()
    assert not unfinished.root.exists()
