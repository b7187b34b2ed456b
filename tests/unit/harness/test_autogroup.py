"""What the tests set in this machine's kernel is put back, however they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.conditions import without_autogroup

ROOT = Path(__file__).resolve().parents[3]
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.conditions import without_autogroup
with without_autogroup(*map(Path, sys.argv[1:])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def setting(tmp_path: Path) -> Path:
    (setting := tmp_path / "sched_autogroup_enabled").write_text("1\n")
    return setting


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record"


def test_the_next_run_puts_back_what_a_killed_one_left(setting: Path, record: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(setting), str(record)]
    assert subprocess.run(argv, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert setting.read_text() == "0"
    with without_autogroup(setting, record):
        assert setting.read_text() == "0"
    assert setting.read_text() == "1"


def test_the_last_of_several_runs_puts_it_back(setting: Path, record: Path) -> None:
    with without_autogroup(setting, record):
        with without_autogroup(setting, record):
            pass
        assert setting.read_text() == "0"
    assert setting.read_text() == "1"


def test_a_kernel_without_autogroups_is_left_alone(tmp_path: Path, record: Path) -> None:
    with without_autogroup(tmp_path / "none", record):
        pass
    assert not list(tmp_path.iterdir())
