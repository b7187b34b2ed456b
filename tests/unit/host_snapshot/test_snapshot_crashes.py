"""The host snapshot after a kill or on a full disk: the next run completes the record or the restore."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.host_snapshot.conftest import Machine

Snapshot = Callable[..., dict[str, Any]]
Util = Callable[[str], ModuleType]
RUNS = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n"


class Packages:
    """A package manager. ``purge``: called when packages are removed."""

    def __init__(self, tree: Path, purge: Callable[[], None]) -> None:
        self._tree = tree
        self._purge = purge
        self.there = {"adduser": "1"}
        self.kept: list[str] = []

    def installed(self) -> dict[str, str]:
        return dict(self.there)

    def settings(self) -> list[str]:
        return []

    def automatic(self) -> list[str]:
        return []

    def changed_settings(self, _: list[str]) -> list[str]:
        return []

    def removable(self, names: set[str]) -> list[str]:
        return sorted(names)

    def purged(self, names: list[str], folders: list[str]) -> list[str]:
        return [
            folder
            for folder in folders
            if Path(folder).is_relative_to(self._tree) and "munge" in names
        ]

    def remove(self, names: list[str], keep_settings: list[str]) -> None:
        self.kept = sorted(keep_settings)
        for name in names:
            del self.there[name]
        self._purge()


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """The host's /etc."""
    folder = tmp_path / "etc"
    folder.mkdir()
    for name in ("passwd", "group"):
        (folder / name).touch()
    return folder


@pytest.fixture
def paths(etc: Path, util: Util) -> Any:
    return util("snapshot_host").HostPaths(etc=str(etc))


def test_existing_folders_survive_a_purge_and_a_killed_purge(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    tree = tmp_path / "munge"
    tree.mkdir()
    (tree / "seed").write_text("theirs")
    tries = 0

    def purge() -> None:
        nonlocal tries
        tries += 1
        assert not tree.exists()
        tree.mkdir()  # a package's removal may make it anew
        raise KeyboardInterrupt

    packages = Packages(tree, purge)
    snapshot("recorded", packages=packages, trees=[str(tree)])
    packages.there["munge"] = "1"
    snapshot("sealed", packages=packages, trees=[str(tree)])
    with pytest.raises(KeyboardInterrupt):
        snapshot("restored", packages=packages)
    tree.rename(tmp_path / ".munge.clusterctl-aside")  # as a kill would have left it
    snapshot("restored", packages=packages)
    assert (tries, packages.there) == (1, {"adduser": "1"})
    assert [path.name for path in tree.iterdir()] == ["seed"]


def test_mount_point_keeps_the_settings_of_its_package(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = [tmp_path / "var/lib", tmp_path / "var/log"]
    for tree in trees:
        tree.mkdir(parents=True)
        (tree / "seed").write_text("theirs")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == trees[1]:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    packages = Packages(tmp_path / "var", lambda: None)
    snapshot("recorded", packages=packages, trees=[str(tree) for tree in trees])
    packages.there |= {"munge": "1", "slurmd": "1"}
    snapshot("sealed", packages=packages, trees=[str(tree) for tree in trees])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        left = snapshot("restored", packages=packages)["clusterctl_notes"]
    assert [("munge" in note, str(trees[1]) in note) for note in left] == [(True, True)]
    assert (packages.kept, packages.there) == (["munge"], {"adduser": "1"})
    assert sorted(path.name for path in (tmp_path / "var").rglob("*")) == [
        "lib",
        "log",
        "seed",
        "seed",
    ]


def test_folder_set_aside_is_kept_if_a_new_folder_has_its_name(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    tree = tmp_path / "munge"
    aside = tmp_path / ".munge.clusterctl-aside"
    tree.mkdir()
    (tree / "seed").write_text("theirs")
    packages = Packages(tree, lambda: None)
    snapshot("recorded", packages=packages, trees=[str(tree)])
    packages.there["munge"] = "1"
    snapshot("sealed", packages=packages, trees=[str(tree)])
    tree.rename(aside)  # as a kill would have left it
    tree.mkdir()
    (tree / "log").write_text("written since")
    left = snapshot("restored", packages=packages)["clusterctl_notes"]
    assert any(note.startswith(f"{tree}: ") and note.endswith(f" {aside}") for note in left)
    assert [path.name for path in (*tree.iterdir(), *aside.iterdir())] == ["log", "seed"]


def test_foreign_version_survives_a_kill_after_the_purge(snapshot: Snapshot, etc: Path) -> None:
    conf = etc / "slurm.conf"
    tries = 0

    def purge() -> None:
        nonlocal tries
        tries += 1
        conf.unlink(missing_ok=True)
        if tries == 1:
            raise KeyboardInterrupt

    packages = Packages(etc / "none", purge)
    snapshot("recorded", packages=packages, files=[str(conf)])
    packages.there["slurmd"] = "1"
    conf.write_text("ours\n")
    snapshot("sealed", packages=packages, files=[str(conf)])
    conf.write_text("ours, bettered\n")
    with pytest.raises(KeyboardInterrupt):
        snapshot("restored", packages=packages)
    snapshot("restored", packages=packages)
    assert {path.name: path.read_text() for path in etc.glob("slurm*")} == {
        "slurm.conf.clusterctl-kept": "ours, bettered\n"
    }


def test_unit_reads_restored_files_after_a_kill(
    snapshot: Snapshot, machine: Machine, etc: Path
) -> None:
    key = etc / "munge.key"
    key.write_text("theirs")
    machine.answers["systemctl", "show"] = 0, RUNS, ""
    touches = {"files": [str(key)], "units": ["munge.service"]}
    snapshot("recorded", **touches)
    key.write_text("ours")
    snapshot("sealed", **touches)
    machine.killed_at = ("systemctl", "daemon-reload")
    with pytest.raises(KeyboardInterrupt):
        snapshot("restored")
    machine.killed_at = ()
    assert key.read_text() == "theirs"
    assert ["systemctl", "restart", "munge.service"] not in machine.ran
    snapshot("restored")
    assert ["systemctl", "restart", "munge.service"] in machine.ran


def test_full_disk_is_an_error_and_leaves_no_snapshot(
    snapshot: Snapshot, etc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (etc / "a.conf").write_text("theirs")
    with monkeypatch.context() as patch:

        def full(_: object, path: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError) as caught:  # noqa: PT011 - by its number
            snapshot("recorded", files=[str(etc / "a.conf")])
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "snapshot").exists()
    assert snapshot("restored")["changed"]
    assert not (tmp_path / "snapshot").exists()


def test_leftovers_of_a_killed_removal_are_ignored(
    snapshot: Snapshot, etc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (etc / "a.conf").write_text("old")
    snapshot("recorded", files=[])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            snapshot("restored")
    stale = tmp_path / "snapshot/etc"
    stale.mkdir()
    (stale / "gone.conf").write_text("removed by its owner since")
    packages = Packages(tmp_path / "none", lambda: None)
    snapshot("recorded", packages=packages)
    packages.there["munge"] = "1"
    snapshot("sealed", packages=packages)
    snapshot("restored", packages=packages)
    assert sorted(path.name for path in etc.iterdir()) == ["a.conf", "group", "passwd"]
