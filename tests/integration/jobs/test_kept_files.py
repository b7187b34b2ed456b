"""The number and size of what clusterctl keeps on a cluster for later jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.jobs.kept_files import KeptFiles, kept_files, summary
from tests.support.local_transport import LocalTransport


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "clusterctl"


def test_kept_files_are_counted_without_incomplete_ones(folder: Path) -> None:
    for name in (
        "environments/.one.aaaaaa",
        "environments/.two.bbbbbb",
        "builds/b",
        "builds/.part",
        "images/folder-of-charliecloud",
    ):
        (folder / name).mkdir(parents=True)
    (folder / "environments/one").symlink_to(".one.aaaaaa")
    (folder / "environments/.lock").touch()
    (folder / "images/made.sif").touch()
    (folder / "images/.made.sif.lock").touch()
    for name in ("store/ab/ab12", "store/cd/cd34", "store/partial/ef56", "store/lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(100_000))
    found = kept_files(LocalTransport(), "clusterctl")
    numbers = [(name, one.number) for name, one in found.items()]
    assert numbers == [
        ("environments", 1),
        ("builds", 1),
        ("images", 2),
        ("store", 2),
    ]
    size = found["store"].bytes
    assert size is not None
    assert 200_000 < size < 1_000_000


def test_nothing_is_kept_before_the_first_job(folder: Path) -> None:
    assert kept_files(LocalTransport(), "clusterctl") == {}
    (folder / "store").mkdir(parents=True)
    assert summary(kept_files(LocalTransport(), "clusterctl")) == ""


def test_size_that_takes_too_long_is_unknown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sizes have a single time limit."""
    (folder / "builds/b").mkdir(parents=True)
    (folder / "images").mkdir()
    (folder / "images/1.sif").touch()
    slow = "case $3 in builds) echo 4 builds; exec sleep 60 ;; esac\necho 8 $3\n"
    (tmp_path / "du").write_text(f"#!/bin/sh\n{slow}")
    (tmp_path / "du").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    # Time for the other program's start on a busy machine.
    monkeypatch.setattr("clusterctl.jobs.kept_files._SIZES_S", 15)
    found = kept_files(LocalTransport(), "clusterctl")
    assert found == {"builds": KeptFiles(1, None), "images": KeptFiles(1, 8192)}
    assert "unknown" in summary(found)
