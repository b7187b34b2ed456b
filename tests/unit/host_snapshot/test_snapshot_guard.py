"""Files in /etc that the purge of a package removes although they belong to others are put back."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    (folder / "slurm/old").mkdir(parents=True)
    (folder / "slurm").chmod(0o750)
    (folder / "slurm/old/slurm.conf").write_text("theirs")
    (folder / "slurm/old/slurm.conf").chmod(0o640)
    (folder / "slurm/current").symlink_to("old")
    (folder / "slurm/ours.conf").write_text("ours")
    return folder


def test_guard_puts_back_files_that_a_purge_removed(
    root: Path, tmp_path: Path, util: Callable[[str], ModuleType]
) -> None:
    guard = util("snapshot_guard").Guard(str(tmp_path / "held"), str(root))
    guard.hold()
    number = (root / "slurm/old/slurm.conf").stat().st_ino
    shutil.rmtree(root / "slurm")
    back = guard.put_back(exclude={str(root / "slurm/ours.conf")})
    assert back == [str(root / "slurm/current"), str(root / "slurm/old/slurm.conf")]
    assert (root / "slurm/old/slurm.conf").stat().st_ino == number
    assert (root / "slurm").stat().st_mode & 0o777 == 0o750
    assert (root / "slurm/current").readlink() == Path("old")
    assert not (root / "slurm/ours.conf").exists()


def test_guard_of_a_second_attempt_has_the_files_of_the_first(
    root: Path, tmp_path: Path, util: Callable[[str], ModuleType]
) -> None:
    guards = [util("snapshot_guard").Guard(str(tmp_path / "held"), str(root)) for _ in range(2)]
    guards[0].hold()
    shutil.rmtree(root / "slurm")  # and it is killed here
    guards[1].hold()
    assert len(guards[1].put_back(exclude=())) == 3


def test_guard_holds_pipes_and_links_across_file_systems(
    root: Path, tmp_path: Path, util: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(root / "slurm/pipe", 0o640)
    monkeypatch.setattr(
        os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EXDEV, "another"))
    )
    guard = util("snapshot_guard").Guard(str(tmp_path / "held"), str(root))
    guard.hold()
    shutil.rmtree(root / "slurm")
    guard.put_back(exclude=())
    assert (root / "slurm/pipe").is_fifo()
    assert (root / "slurm/old/slurm.conf").read_text() == "theirs"


def test_restore_removes_files_that_a_package_created(
    util: Callable[[str], ModuleType],
    snapshot: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    for name in ("passwd", "group"):
        (etc / name).touch()
    paths = util("snapshot_host").HostPaths(etc=str(etc))
    snapshot("recorded", on=paths, folders=[str(etc / "mysql")])
    (etc / "mysql").mkdir()
    (etc / "mysql/debian.cnf").write_text("generated")
    (etc / "alternatives").write_text("generated, but in nobody's folder")
    (etc / "exports.ucf-dist").write_text("the package's version of a file that was there")
    snapshot("sealed", on=paths, folders=[str(etc / "mysql")])
    assert snapshot("restored", on=paths)["clusterctl_notes"] == []
    assert sorted(path.name for path in etc.iterdir()) == ["alternatives", "group", "passwd"]
