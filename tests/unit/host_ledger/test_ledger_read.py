"""Ledgers that an older clusterctl wrote, or that somebody damaged: what `restored` makes of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.host_ledger.conftest import Machine, Refuses

Ledger = Callable[..., dict[str, Any]]
LABEL = "system_u:object_r:etc_t:s0\0"


@pytest.fixture
def conf(tmp_path: Path, ledger: Ledger) -> Path:
    """A file of somebody's that we have changed."""
    path = tmp_path / "a.conf"
    path.write_text("theirs")
    ledger("recorded", files=[str(path)])
    path.write_text("ours")
    ledger("sealed", files=[str(path)])
    return path


def rewrite(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = tmp_path / "ledger/ledger.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_one_of_the_first_release_gives_back_files_and_their_labels(
    ledger: Ledger, conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {}
    monkeypatch.setattr(os, "setxattr", lambda _, name, value: labels.update({name: value}))

    def first(found: dict[str, Any]) -> None:
        entry = found["paths"][str(conf)]
        del entry["when_ns"], found["packages"]["settings"], found["etc"], found["patterns"], found["changed"]
        entry["before"].pop("attributes", None)
        entry["before"]["context"] = LABEL

    rewrite(tmp_path, first)
    assert ledger("restored")["done"] == [f"put back {conf}"]
    assert conf.read_text() == "theirs"
    assert labels == {"security.selinux": LABEL.encode()}


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version": lambda found: found.update(version="new"),
    "paths": lambda found: found.update(paths=[]),
    "packages": lambda found: found.update(packages=None),
    "units": lambda found: found["units"].update({"munge.service": {"load": "loaded"}}),
    "trees": lambda found: found["trees"].update({"/var/lib/munge": "yes"}),
    "sealed": lambda found: found.update(sealed=None),
    "before": lambda found: next(iter(found["paths"].values())).pop("before"),
    "content": lambda found: next(iter(found["paths"].values()))["before"].pop("content"),
    "kind": lambda found: next(iter(found["paths"].values()))["after"].update(kind="socket"),
    "hexadecimal": lambda found: next(iter(found["paths"].values()))["before"].update(attributes={"a": "?"}),
}


@pytest.mark.parametrize("name", [*DAMAGES, "no text", "cut"])
def test_a_damaged_one_is_one_clear_failure_and_nothing_goes(
    ledger: Ledger, conf: Path, tmp_path: Path, name: str, refuses: Refuses
) -> None:
    book = tmp_path / "ledger/ledger.json"
    if name in DAMAGES:
        rewrite(tmp_path, DAMAGES[name])
    else:
        book.write_bytes(b"\xff\0\xfe" if name == "no text" else book.read_bytes()[:40])
    with refuses("ledger.json is damaged ("):
        ledger("restored")
    assert conf.read_text() == "ours"


def test_a_content_that_is_gone_is_told_before_anything_goes(
    ledger: Ledger, conf: Path, machine: Machine, tmp_path: Path, refuses: Refuses
) -> None:
    ledger("recorded", files=[str(conf)], units=["munge.service"])
    ledger("sealed", files=[str(conf)], units=["munge.service"])
    runs = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n"
    machine.answers["systemctl", "show"] = 0, runs, ""
    shutil.rmtree(tmp_path / "ledger/contents")
    with refuses("is gone"):
        ledger("restored")
    assert ["systemctl", "stop", "munge.service"] not in machine.ran
