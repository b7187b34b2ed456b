"""What the tests of transfers share: a home that plays the cluster's, and a folder with all that is hard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.hostile import HOSTILE_NAMES

MIB = 1 << 20


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home on the cluster."""
    folder = tmp_path / "remote home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with all that is hard."""
    folder = tmp_path / "data"
    (folder / "sub" / "empty").mkdir(parents=True)
    for name in HOSTILE_NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)
    (folder / "sub" / "nothing").touch()
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o751)
    (folder / "large").write_bytes(os.urandom(3 * MIB))
    (folder / "link").symlink_to("sub/run.sh")
    (folder / "dangling").symlink_to("/no/such\nplace")
    os.utime(folder / "large", ns=(1, 1_234_567_890_123_456_789))
    os.utime(folder / "sub", ns=(1, 1_111_111_111_000_000_000))
    return folder
