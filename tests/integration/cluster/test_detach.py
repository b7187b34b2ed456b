"""`detach` after a failed or killed `attach` removes exactly what `attach` created."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.cluster.detach import DetachOptions, detach
from clusterctl.errors import (
    LeftoversError,
    NoAnswerError,
    OnlyCopyError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.providers.existing.detach import AttachedFolder
from clusterctl.state.inventory import CONTROLLER, PartitionFacts
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import HERE, LOGIN_HOST, write_login_files
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused

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


@pytest.fixture
def finished(unfinished: Workspace) -> Workspace:
    """A workspace with hosts.json. Slurm has no jobs."""
    here = unfinished.root.parent
    folder = unfinished.root.parent / "there/ours"
    (here / "squeue").write_text("#!/bin/sh\n")
    (here / "squeue").chmod(0o755)
    recorded = inventory_of(
        hosts=(host_of(LOGIN_HOST, CONTROLLER),),
        partitions=(PartitionFacts("short", ("n1",)),),
        job_user="ada",
        is_foreign=True,
        slurm_path=str(here),
        folder=str(folder),
        root=str(folder),
        no_accounting="it is closed",
    )
    unfinished.inventory.write_text(recorded.text)
    fill(unfinished, unfinished.cluster_id(), "jobs")
    return unfinished


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


def test_detach_of_an_unfinished_attach_keeps_only_copies(unfinished: Workspace) -> None:
    folder = fill(unfinished, unfinished.cluster_id(), "jobs")
    with pytest.raises(OnlyCopyError):
        detach(unfinished, DetachOptions())
    assert (folder / "jobs").is_dir()
    detach(unfinished, DetachOptions(discard=True))
    assert not folder.exists()


class KilledError(BaseException):
    """A kill."""


@pytest.mark.parametrize("half_gone", [False, True])
def test_detach_killed_after_the_removal_ends(
    finished: Workspace, monkeypatch: pytest.MonkeyPatch, half_gone: bool
) -> None:
    spec = finished.spec.read_text()

    def kill(workspace: Workspace) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "remove", kill)
        with pytest.raises(KilledError):
            detach(finished, DetachOptions())
    assert list((finished.root.parent / "there").iterdir()) == []
    if half_gone:
        finished.ssh_config.unlink()
    else:
        finished.spec.write_text(spec)
    detach(finished, DetachOptions())
    assert not finished.root.exists()


def test_detach_killed_during_workspace_removal_is_complete(
    finished: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the file `login`, no command takes the remaining files for an attached cluster."""

    def kill(folder: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (folder / "login").unlink()
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", kill)
        with pytest.raises(KilledError):
            detach(finished, DetachOptions())
    assert not finished.root.exists()


@pytest.mark.parametrize("error", [UnreachableError("lost"), NoAnswerError("lost")])
def test_detach_that_lost_its_answer_ends_later(
    finished: Workspace, monkeypatch: pytest.MonkeyPatch, error: TransportError
) -> None:
    remove = AttachedFolder.remove

    def remove_and_fail(folder: AttachedFolder) -> None:
        remove(folder)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(AttachedFolder, "remove", remove_and_fail)
        with pytest.raises(type(error)):
            detach(finished, DetachOptions())
    assert list((finished.root.parent / "there").iterdir()) == []
    detach(finished, DetachOptions())
    assert not finished.root.exists()


def test_damaged_record_is_not_taken_for_an_unfinished_attach(finished: Workspace) -> None:
    finished.inventory.write_text("{")
    with refused("record-damaged/cluster", UsageError):
        detach(finished, DetachOptions(discard=True))
    assert (finished.root.parent / "there/ours").exists()
    assert detach(finished, DetachOptions(forget=True)).left


def test_detach_removes_the_folder_of_the_last_finished_attach(finished: Workspace) -> None:
    finished.spec.write_text(SPEC.format(folder=finished.root.parent / "there/other"))
    assert detach(finished, DetachOptions()).folder.endswith("/ours")
    assert not (finished.root.parent / "there/ours").exists()


def test_detach_that_fails_leaves_the_cluster_in_use(
    finished: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished.root.parent / "there/ours"
    programs = finished.root.parent / "bin"
    programs.mkdir()
    (programs / "rm").write_text("#!/bin/sh\nexit 1\n")
    (programs / "rm").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        with pytest.raises(LeftoversError):
            detach(finished, DetachOptions())
    assert (folder / "jobs").is_dir()
    assert not finished.removing.exists()
    detach(finished, DetachOptions())
    assert not finished.root.exists()


def test_missing_folder_that_no_detach_removed_is_no_success(finished: Workspace) -> None:
    """Its disk may not be mounted."""
    (finished.root.parent / "there/ours").rename(finished.root.parent / "elsewhere")
    with pytest.raises(OnlyCopyError):
        detach(finished, DetachOptions())
    assert finished.root.exists()


def test_detach_forget_needs_no_login_and_names_the_folder(unfinished: Workspace) -> None:
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
