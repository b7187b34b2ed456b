"""The Python for clusters whose own are too old: downloaded by uv, and packed."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from clusterctl.errors import MachineError
from clusterctl.packages.standalone_python import RELEASE, fetch_standalone_python, version_of
from clusterctl.util.progress import SILENT
from tests.support.messages import refused
from tests.support.standalone import real_python, small_python, standalone_list

VARIABLE = "UV_PYTHON_DOWNLOADS_JSON_URL"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache/uv"))


def test_standalone_python_is_downloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, standalone_list(tmp_path, small_python()))
    said: list[str] = []
    python = fetch_standalone_python(said.append)
    assert version_of(python.name) == f"{RELEASE}.0"
    assert len(said) == 2
    (tmp_path / "python.tar.gz").unlink()
    assert fetch_standalone_python(said.append) == python
    assert len(said) == 2
    # Another list has another build.
    more = tmp_path / "more"
    more.mkdir()
    monkeypatch.setenv(VARIABLE, standalone_list(more, small_python("#!/bin/sh\n")))
    other = fetch_standalone_python(said.append)
    assert other.name != python.name
    assert len(said) == 4


def test_standalone_python_runs_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, standalone_list(tmp_path, real_python()))
    python = fetch_standalone_python(SILENT.note)
    place = tmp_path / "elsewhere"
    with tarfile.open(python.archive) as packed:
        packed.extractall(place, filter="data")
    argv = [place / "bin/python3", "-IS", "-c", "import sys, zlib; print(sys.prefix)"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(place)


@pytest.mark.parametrize(
    "changed",
    [{"sha256": "0" * 64}, {"url": "file:///nowhere/python.tar.gz"}],
    ids=["hash", "gone"],
)
def test_standalone_python_that_can_not_be_downloaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    monkeypatch.setenv(VARIABLE, standalone_list(tmp_path, small_python(), **changed))
    with refused("transfer-failed/python-download", MachineError, "UV_PYTHON_INSTALL_MIRROR"):
        fetch_standalone_python(SILENT.note)
