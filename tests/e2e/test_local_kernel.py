"""What a local cluster sets in this machine's kernel; runs alone, for all clusters here share it."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.providers.local.image import states
from clusterctl.providers.local.machine import booted_with_systemd
from tests.support.autogroup import SETTING
from tests.support.cluster import raised
from tests.support.nested import as_root

SPEC = "version: 1\nname: {name}\nprovider: {{type: local}}\npartitions:\n  - {{name: one, nodes: 1}}\n"


def write(value: str) -> None:
    subprocess.run([*as_root(), "tee", SETTING], input=value, text=True, check=True, capture_output=True)


@pytest.fixture
def autogroup() -> Iterator[None]:
    """As most kernels begin; the tests themselves run without (tests/support/autogroup.py)."""
    if not SETTING.exists():  # not in every kernel
        yield
        return
    before = SETTING.read_text()
    write("1")
    yield
    write(before)


def test_sessions_share_no_cpus_while_it_is_up(autogroup: None, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    name = f"k{secrets.token_hex(3)}"
    others = states()
    with raised(name, SPEC.format(name=name), tmp_path / "home", tmp_path) as cluster:
        said = any("kernel.sched_autogroup_enabled from 1 to 0" in note for note in cluster.raised["notes"])
        assert said == (SETTING.exists() and not booted_with_systemd())
        assert not SETTING.exists() or int(SETTING.read_text()) == (0 if said else 1)
    if not others:  # the last one puts it back
        assert not SETTING.exists() or int(SETTING.read_text()) == 1
