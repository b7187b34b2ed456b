"""A restore from a damaged snapshot fails before it changes the host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.host_snapshot.conftest import Machine, Refuses

Snapshot = Callable[..., dict[str, Any]]


@pytest.fixture
def conf(tmp_path: Path, snapshot: Snapshot) -> Path:
    """Return a file of the host's owner that `up` has changed."""
    path = tmp_path / "a.conf"
    path.write_text("theirs")
    snapshot("recorded", files=[str(path)])
    path.write_text("ours")
    snapshot("sealed", files=[str(path)])
    return path


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewrite(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = tmp_path / "snapshot/ledger.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda found: found.update(version="new"),
    "paths": lambda found: found.update(paths=[]),
    "packages": lambda found: found.update(packages=None),
    "units": lambda found: found["units"].update({"munge.service": {"load": "loaded"}}),
    "before": lambda found: next(iter(found["paths"].values())).pop("before"),
    "noted": lambda found: found["packages"].pop("before"),
    "sealed": lambda found: found.update(sealed=None),
}


@pytest.mark.parametrize("name", [*DAMAGES, "no text", "cut"])
def test_restore_with_a_damaged_ledger_fails_and_removes_nothing(
    snapshot: Snapshot, conf: Path, tmp_path: Path, name: str, refuses: Refuses
) -> None:
    book = tmp_path / "snapshot/ledger.json"
    if name in DAMAGES:
        rewrite(tmp_path, DAMAGES[name])
    else:
        book.write_bytes(b"\xff\0\xfe" if name == "no text" else book.read_bytes()[:40])
    before = files_below(tmp_path)
    with refuses("ledger.json is damaged ("):
        snapshot("restored")
    assert files_below(tmp_path) == before


def test_restore_with_missing_contents_fails_before_any_change(
    snapshot: Snapshot, conf: Path, machine: Machine, tmp_path: Path, refuses: Refuses
) -> None:
    snapshot("recorded", files=[str(conf)], units=["munge.service"])
    snapshot("sealed", files=[str(conf)], units=["munge.service"])
    runs = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n"
    machine.answers["systemctl", "show"] = 0, runs, ""
    shutil.rmtree(tmp_path / "snapshot/contents")
    machine.ran.clear()
    before = files_below(tmp_path)
    with refuses("is missing"):
        snapshot("restored")
    assert files_below(tmp_path) == before
    assert [argv for argv in machine.ran if argv[:2] != ["systemctl", "show"]] == []
