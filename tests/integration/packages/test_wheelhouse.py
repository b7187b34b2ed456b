"""The wheels for nodes are downloaded once, completely or not at all, with pip's own settings."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.wheels import a_wheel

PROGRAM = """
import json, sys
from pathlib import Path
from clusterctl.errors import ClusterctlError
from clusterctl.packages.wheelhouse import wheelhouse
try:
    print(json.dumps({"folder": str(wheelhouse(Path(sys.argv[1])))}))
except ClusterctlError as error:
    print(json.dumps({"what": error.what, "why": error.why, "fix": error.fix}))
"""
ROOT = Path(__file__).resolve().parents[3]


Fetch = Callable[..., dict[str, str]]


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    path = tmp_path / "requirements.lock"
    path.write_text(
        a_wheel(tmp_path / "index", "firstpart") + a_wheel(tmp_path / "index", "secondpart")
    )
    return path


@pytest.fixture
def fetch(tmp_path: Path, lock: Path) -> Fetch:
    """Ask for the wheelhouse of the lock, in a process that has an index and a cache of its own."""
    (tmp_path / "cwd").mkdir()
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
    }
    env |= {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PYTHONPATH": str(ROOT),
    }
    argv = [sys.executable, "-P", "-c", PROGRAM, str(lock)]

    def call(**changes: str) -> dict[str, str]:
        done = subprocess.run(
            argv,
            cwd=tmp_path / "cwd",
            env=env | changes,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return call


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_wheelhouse_downloads_each_locked_wheel_once(
    fetch: Fetch, lock: Path, tmp_path: Path
) -> None:
    folder = Path(fetch()["folder"])
    assert names(folder) == ["firstpart-1.0-py3-none-any.whl", "secondpart-1.0-py3-none-any.whl"]
    assert names(tmp_path / "cache" / "clusterctl") == [folder.name]
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o022  # others may not write into it
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert Path(fetch()["folder"]) == folder
    lock.write_text(a_wheel(tmp_path / "index", "thirdpart"))
    assert Path(fetch()["folder"]) != folder


def test_wheel_that_is_not_what_was_locked_is_refused(fetch: Fetch, tmp_path: Path) -> None:
    a_wheel(tmp_path / "index", "secondpart")
    with ZipFile(tmp_path / "index" / "secondpart-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("malice.py", "malice = True\n")
    error = fetch()
    assert "HASH" in error["why"].upper()
    assert error["fix"]
    assert names(tmp_path / "cache" / "clusterctl") == []


def test_lock_without_a_hash_is_refused(fetch: Fetch, lock: Path) -> None:
    lock.write_text("firstpart==1.0\n")
    assert "hash" in fetch()["why"]


def test_pip_ignores_files_in_the_current_folder(fetch: Fetch, tmp_path: Path) -> None:
    for name in ("pip.py", "random.py", "logging.py"):
        (tmp_path / "cwd" / name).write_text("raise SystemExit('this is mine')\n")
    assert "folder" in fetch()


def test_relative_cache_folder_is_ignored(fetch: Fetch, tmp_path: Path) -> None:
    folder = fetch(XDG_CACHE_HOME="here", HOME=str(tmp_path / "home"))["folder"]
    assert Path(folder).parent == tmp_path / "home" / ".cache" / "clusterctl"


def test_missing_home_is_an_error_with_a_fix(fetch: Fetch) -> None:
    error = fetch(XDG_CACHE_HOME="", HOME="~nobody-of-that-name")
    assert "home folder" in error["what"]
    assert "XDG_CACHE_HOME" in error["fix"]
