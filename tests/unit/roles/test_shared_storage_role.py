"""The role shared_storage: a folder that people share already stays as they have it."""

from __future__ import annotations

from pathlib import Path

from tests.support.plays import run_tasks


def mode_after_install(tmp_path: Path, folder: Path) -> int:
    done = run_tasks(
        tmp_path,
        "shared_storage",
        "install",
        shared_storage_path=str(folder),
        shared_storage_kind="existing",
    )
    assert done.returncode == 0, done.stdout
    return folder.stat().st_mode & 0o7777


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o2775)
    assert mode_after_install(tmp_path, folder) == 0o2775


def test_one_that_is_missing_is_made(tmp_path: Path) -> None:
    assert mode_after_install(tmp_path, tmp_path / "shared") == 0o755
