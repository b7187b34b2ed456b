"""Tests run the same whatever started them, and each ends: held by running pytest under such
conditions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.run_tests import read
from tests.support.processes import ends_within_a_minute

ROOT = Path(__file__).resolve().parents[3]
HOOKS = (
    "pytest_configure, pytest_runtest_call, pytest_runtest_setup, pytest_runtest_teardown, "
    "pytest_timeout_cancel_timer, pytest_timeout_set_timer"
)
RunTests = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_tests(tmp_path: Path) -> RunTests:
    """Runs a module of tests as this project's, by `pytest OPTIONS`, beneath a shell's command."""
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {HOOKS}\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntimeout = 60\npythonpath = {ROOT}\n")

    def run(
        text: str, *options: str, shell: str = 'exec "$@"', env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(text)
        argv = [
            "bash",
            "-c",
            shell,
            "bash",
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
        ]
        argv += [f"--junitxml={tmp_path / 'report.xml'}", *options]
        # With folders of its own: pytest ends by removing those of earlier runs beside its own, and
        # a whole run's take longer than this one's time.
        environ = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(tmp_path), **(env or {})}
        return subprocess.run(
            argv,
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


SHOWS = """
import os, signal, subprocess, sys
import pytest

def test_interrupt():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

def test_programs():
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    masks = dict(line.split(":\\t") for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn")))
    # 32 and 33 are glibc's own: its posix_spawn, by which make starts programs, ignores them.
    assert {int(mask, 16) & ~(3 << 31) for mask in masks.values()} == {0}
    assert subprocess.run(["sh", "-c", "umask"], capture_output=True).stdout == b"0022\\n"
    assert sys.stdin.closed or not os.read(0, 1)

def test_environment():
    foreign = {"TZ", "NO_COLOR", "COLUMNS", "CI", "LC_ALL", "PYTHONWARNINGS", "SLURM_JOB_ID"}
    assert not foreign & set(os.environ)
    assert "shims" not in {folder.rpartition("/")[2] for folder in os.environ["PATH"].split(":")}
"""


@pytest.mark.parametrize(
    ("shell", "options"),
    [
        ('trap "" INT QUIT HUP TERM CHLD USR1; umask 077; exec setsid -w "$@" <&-', ["-n1"]),
        ('umask 0; "$@" <&- & wait $!', []),  # a script's background
    ],
)
def test_what_started_the_tests_makes_no_difference(
    run_tests: RunTests, shell: str, options: list[str]
) -> None:
    hostile = {
        "TZ": "Asia/Kathmandu",
        "NO_COLOR": "1",
        "COLUMNS": "20",
        "CI": "true",
        "LC_ALL": "C",
    }
    hostile |= {"PYTHONWARNINGS": "error::UserWarning", "SLURM_JOB_ID": "7"}
    hostile["PATH"] = f"/nowhere/shims:{os.environ['PATH']}"
    done = run_tests(SHOWS, *options, shell=shell, env=hostile)
    assert done.returncode == 0, done.stdout + done.stderr


HANGS = """
import signal, subprocess, threading, time
import pytest

def test_waits():
    threading.Thread(target=threading.Event().wait, name="another", daemon=True).start()
    with subprocess.Popen(["sh", "-c", "sleep 300 & echo $! >pid; wait"]):
        pass

def test_catches():
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        try:
            time.sleep(0.5)
        except BaseException:
            pass

@pytest.fixture
def hanging():
    yield
    subprocess.run(["sleep", "300"])

def test_teardown(hanging):
    raise ValueError

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(300)

def test_last():
    pass
"""


def test_a_test_that_hangs_fails_alone_and_its_programs_end(
    run_tests: RunTests, tmp_path: Path
) -> None:
    done = run_tests(HANGS, "-n1", "--timeout=1")
    report = read("unit", tmp_path / "report.xml")
    assert (report.passed, report.failed) == (1, 5), done.stdout  # the teardown counts, too
    assert "Stack of another" in done.stdout
    assert "its time limit" in done.stdout
    assert "crashed while running 'test_it.py::test_deaf'" in done.stdout
    assert "in test_deaf" in done.stderr
    assert ends_within_a_minute(int((tmp_path / "pid").read_text()))


RUNS = """
import sys
from pathlib import Path
from scripts import run_tests
run_tests.end_by_signals()
with run_tests.started(sys.argv[3:], grace_s=int(sys.argv[2])) as process:
    code = run_tests.ended(process, float(sys.argv[1]))
sys.exit(code)
"""
WAITS = (
    'trap "echo interrupted >ending; exit 3" INT; sleep 300 & echo $! >pid; while :; do wait; done'
)


def started(folder: Path, *, trap: str = "true", limit_s: float = 60) -> subprocess.Popen[str]:
    """A part of `make test` that runs for ever; it began its work."""
    program = ["bash", "-c", f"cd {folder}; {WAITS}"]
    argv = [
        "bash",
        "-c",
        f'{trap}; exec "$@"',
        "bash",
        sys.executable,
        "-c",
        RUNS,
        str(limit_s),
        "10",
        *program,
    ]
    process = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_ends_what_it_started(tmp_path: Path, sign: signal.Signals) -> None:
    with started(tmp_path) as process:
        process.send_signal(sign)
        code = process.wait(30)
        assert process.stdout
        process.stdout.read()  # all that write to it have ended
    assert code == (-sign if sign == signal.SIGKILL else 128 + sign)
    assert (tmp_path / "ending").exists()
    assert ends_within_a_minute(int((tmp_path / "pid").read_text()))


def test_what_a_background_ignores_the_run_ignores_too(tmp_path: Path) -> None:
    with started(tmp_path, trap="trap '' INT HUP") as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_a_part_has_a_limit(tmp_path: Path) -> None:
    with started(tmp_path, limit_s=3) as process:
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "within 3 s" in told
    assert ends_within_a_minute(int((tmp_path / "pid").read_text()))
