"""Files that are copied to the disk of a node before the program starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from payload.node import stage
from payload.node.stage import STORE, StageError, StageResult
from tests.support.processes import ROOT

# Stages files, tells how, and keeps them until its input ends.
HOLD = """\
import sys
from payload.node.stage import stage
staged = stage(sys.argv[1], sys.argv[2], print)
print(staged.copied, staged.reason, sep="|", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "deep" / "empty").mkdir(parents=True)
    for number in range(40):
        (folder / "deep" / f"{number}.bin").write_bytes(os.urandom(number * 100))
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o750)
    (folder / "deep" / "inside").symlink_to("../run.sh")
    (folder / "outside").symlink_to("../other")
    (tmp_path / "other").write_text("other\n")
    (tmp_path / "disk").mkdir()
    return folder


@pytest.fixture
def staged(tmp_path: Path) -> Callable[..., StageResult]:
    """Stage files on the disk, and release them at once."""

    def run(source: Path, name: str = "x") -> StageResult:
        found = stage.stage(str(source), str(tmp_path / "disk" / name), print)
        for lock in found.locks:
            os.close(lock)
        return found

    return run


def content(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def copies(tmp_path: Path) -> list[str]:
    names = (path.name for path in (tmp_path / "disk" / STORE).iterdir())
    return sorted(name for name in names if not name.endswith(".lock"))


def test_copy_has_the_files_modes_and_links_of_the_source(
    source: Path, staged: Callable[..., StageResult], tmp_path: Path
) -> None:
    found = staged(source)
    target = tmp_path / "disk" / "x"
    assert (found.copied, found.reason, found.files) == (True, "", 41)
    assert content(target) == content(source)
    # Read-only, because the copy is also for later jobs.
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o550
    assert not (target / "deep").stat().st_mode & 0o222
    assert os.readlink(target / "deep" / "inside") == "../run.sh"
    assert (target / "outside").read_text() == "other\n"


def test_same_files_are_copied_once_and_changed_files_again(
    source: Path, staged: Callable[..., StageResult], tmp_path: Path
) -> None:
    assert staged(source).copied
    assert not staged(source).copied
    assert not staged(source, "y").copied
    (source / "run.sh").write_text("#!/bin/bash\n")
    assert staged(source).copied
    assert (tmp_path / "disk" / "x" / "run.sh").read_text() == "#!/bin/bash\n"
    assert len(copies(tmp_path)) == 2


def test_single_file_is_staged(
    source: Path, staged: Callable[..., StageResult], tmp_path: Path
) -> None:
    assert staged(source / "run.sh").files == 1
    assert (tmp_path / "disk" / "x").read_text() == "#!/bin/sh\n"


def start(source: Path, target: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLD, source, target]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def told(job: subprocess.Popen[str]) -> str:
    assert job.stdout is not None
    return job.stdout.readline().strip()


def test_jobs_at_once_copy_once_and_share_the_target(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk" / "x"
    jobs = [start(source, target) for _ in range(4)]
    answers = [told(job) for job in jobs]
    for job in jobs:
        job.communicate()
    assert sorted(answers) == ["False|", "False|", "False|", "True|"]
    assert len(copies(tmp_path)) == 1


def test_target_and_copy_of_a_running_job_stay(
    source: Path,
    staged: Callable[..., StageResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = start(source, tmp_path / "disk" / "x")
    assert told(job) == "True|"
    (source / "run.sh").write_text("changed\n")
    with pytest.raises(StageError, match="another job"):
        staged(source)
    staged(source, "y")
    assert len(copies(tmp_path)) == 2
    # Without room, the copy that no job uses makes room, and that of the running job stays.
    (source / "run.sh").write_text("changed again\n")
    full(monkeypatch)
    found = staged(source, "z")
    assert (found.copied, found.reason != "") == (False, True)
    assert (tmp_path / "disk" / "z").resolve() == source
    assert len(copies(tmp_path)) == 1
    assert (tmp_path / "disk" / "x" / "run.sh").read_text() == "#!/bin/sh\n"
    job.communicate()


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: empty_unless(real(path), False))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Five shards, one of which is a link, and a list."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(5):
        (folder / f"train-{number:03}.tar").write_text(f"{number}\n")
    (folder / "train-003.tar").rename(tmp_path / "elsewhere")
    (folder / "train-003.tar").symlink_to("../elsewhere")
    (folder / "list.txt").write_text("train\n")
    (tmp_path / "disk").mkdir()
    return folder


def shared_out(
    shards: Path, pattern: str, node: int, nodes: int = 2
) -> tuple[StageResult, list[str]]:
    """Stage the share of a node, and return what its program finds."""
    target = shards.parent / "disk" / f"node-{node}"
    found = stage.stage(f"{shards}/{pattern}", str(target), print, (node, nodes))
    for lock in found.locks:
        os.close(lock)
    return found, [f"{path.name} {path.read_text().strip()}" for path in sorted(target.iterdir())]


@pytest.mark.parametrize("pattern", ["train-{000..004}.tar", "train-*.tar"])
def test_each_node_gets_its_share_of_the_shards(shards: Path, pattern: str) -> None:
    first, names = shared_out(shards, pattern, 0)
    assert (first.copied, first.files, first.bytes) == (True, 3, 6)
    assert names == ["train-000.tar 0", "train-002.tar 2", "train-004.tar 4"]
    assert shared_out(shards, pattern, 1)[1] == ["train-001.tar 1", "train-003.tar 3"]
    assert not shared_out(shards, pattern, 1)[0].copied


def test_folder_is_shared_out_without_a_pattern(shards: Path) -> None:
    assert shared_out(shards, "", 1)[1] == ["train-000.tar 0", "train-002.tar 2", "train-004.tar 4"]


def test_share_without_room_leads_to_its_own_shards(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source itself has the shards of all nodes, of which each would then be read twice."""
    full(monkeypatch)
    found, names = shared_out(shards, "train-*.tar", 1)
    assert (found.copied, found.reason != "") == (False, True)
    assert names == ["train-001.tar 1", "train-003.tar 3"]
    (target,) = {path.resolve().parent for path in (shards.parent / "disk/node-1").iterdir()} - {
        shards.parent
    }
    assert target == shards


def test_job_without_room_uses_the_share_that_another_holds(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(shards.parent / "disk" / "data")
    first = stage.stage(f"{shards}/train-*.tar", target, print, (0, 2))
    monkeypatch.setattr(stage, "hold_copy", no_room(stage.hold_copy))
    second = stage.stage(f"{shards}/train-*.tar", target, print, (0, 2))
    for lock in (*first.locks, *second.locks):
        os.close(lock)
    assert second.reason
    assert len(os.listdir(target)) == 3


def no_room(hold: Callable[..., Any]) -> Callable[..., Any]:
    """hold_copy of a job that finds no room for a copy of files."""

    def held(files: Any, store: str, report: Any) -> Any:
        if files.key.endswith("-links"):
            return hold(files, store, report)
        raise OSError(errno.ENOSPC, "No space left on device")

    return held


@pytest.mark.parametrize(
    ("pattern", "nodes"),
    [("train-{000..005}.tar", 2), ("train-*.tar", 6), ("none-*", 1), ("t*-{000..001}.tar", 1)],
)
def test_shards_that_are_missing_or_fewer_than_nodes_are_refused(
    shards: Path, pattern: str, nodes: int
) -> None:
    with pytest.raises(StageError):
        shared_out(shards, pattern, nodes - 1, nodes)


def test_device_is_not_a_source(staged: Callable[..., StageResult]) -> None:
    with pytest.raises(StageError):
        staged(Path("/dev/zero"))


@pytest.mark.parametrize("name", [".", "x", "../data", "../link/x"])
def test_target_in_its_source_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(source)
    before = content(source)
    with pytest.raises(StageError):
        stage.stage(str(source), f"{source}/{name}", print)
    assert content(source) == before


@pytest.mark.parametrize("name", ["gone", "$NOWHERE_SET/x", "relative"])
def test_source_that_is_no_path_of_the_node_is_refused(
    staged: Callable[..., StageResult], tmp_path: Path, name: str
) -> None:
    (tmp_path / "disk").mkdir()
    path = tmp_path / name if name == "gone" else Path(name)
    with pytest.raises(StageError):
        staged(path)


def test_copies_of_another_user_are_not_used(
    source: Path, staged: Callable[..., StageResult], tmp_path: Path
) -> None:
    """Another user may have made the folder first, on a disk where all may write."""
    staged(source)
    (tmp_path / "disk" / STORE).chmod(0o777)
    found = staged(source, "y")
    assert (found.copied, found.reason != "") == (False, True)
    assert (tmp_path / "disk" / "y").resolve() == source


def test_rest_of_a_killed_copy_makes_room_for_the_next(
    source: Path,
    staged: Callable[..., StageResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = tmp_path / "disk" / STORE / f"{stage.FilesToStage.of(str(source)).key}.part"
    part.mkdir(parents=True)
    part.parent.chmod(0o700)
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: empty_unless(real(path), not part.exists()))
    assert staged(source).copied


def test_copy_that_was_used_longest_ago_makes_room_for_the_next(
    source: Path,
    staged: Callable[..., StageResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [source, tmp_path / "other", tmp_path / "new"]
    files[2].write_text("new\n")
    copies = [tmp_path / "disk" / STORE / stage.FilesToStage.of(str(path)).key for path in files]
    for number in (0, 1):
        staged(files[number])
        os.utime(copies[number], (number, number))
    staged(source)
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: empty_unless(real(path), not copies[1].exists())
    )
    assert staged(files[2]).copied
    assert [copy.exists() for copy in copies] == [True, False, True]


def empty_unless(room: os.statvfs_result, is_empty: bool) -> os.statvfs_result:
    values = list(room)
    values[4] = values[4] if is_empty else 0  # f_bavail
    return os.statvfs_result(values)


def test_link_of_the_user_is_kept(
    source: Path, staged: Callable[..., StageResult], tmp_path: Path
) -> None:
    link = tmp_path / "disk" / "x"
    link.symlink_to(tmp_path / "other")
    with pytest.raises(StageError):
        staged(source)
    assert os.readlink(link) == str(tmp_path / "other")


def test_target_that_is_a_file_of_the_user_is_kept(
    source: Path, staged: Callable[..., StageResult], tmp_path: Path
) -> None:
    (tmp_path / "disk" / "x").write_text("mine\n")
    with pytest.raises(StageError):
        staged(source)
    assert (tmp_path / "disk" / "x").read_text() == "mine\n"
