"""`make test` and its like: results are added up, and groups of tests stay together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts import run_tests
from scripts.run_tests import ON_DEBIAN_12
from tests.support.groups import GROUPS, LONGEST

ROOT = Path(__file__).resolve().parents[3]


def test_the_test_command_adds_up_what_pytest_found(tmp_path: Path) -> None:
    tests = tmp_path / "test_sample.py"
    tests.write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_good(): pass\n"
        "def test_bad(): raise ValueError\n"
        "def test_error(broken): pass\n"
        "def test_skipped(): pytest.skip()\n"
    )
    outcome = run_tests.pytest(
        "sample", str(tests), "-q", "-c", os.devnull, "--rootdir", str(tmp_path)
    )
    report = outcome.report
    assert (report.passed, report.failed, report.skipped) == (1, 2, 1)
    assert report.failures == {"test_sample": 2}


def test_a_part_that_names_no_test_has_failed(tmp_path: Path) -> None:
    nothing = run_tests.pytest(
        "sample", str(tmp_path), "-q", "-c", os.devnull, "--rootdir", str(tmp_path)
    )
    assert (nothing.report.passed, nothing.report.failed) == (0, 1)


def test_cpu_time_counts_the_processes_of_a_test(tmp_path: Path) -> None:
    """Of a part, also processes that no test waits for."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_runtest_makereport, pytest_runtest_protocol\n"
    )
    work = "import time\nwhile time.process_time() < 1: pass"
    (tmp_path / "test_sample.py").write_text(
        "import subprocess, sys\n"
        f"WORK = [sys.executable, '-c', {work!r}]\n"
        "def test_waited(): subprocess.run(WORK, check=True)\n"
        "def test_running():\n"
        f"    work = {work + chr(10) + 'print(flush=True); time.sleep(600)'!r}\n"
        "    argv = [sys.executable, '-c', work]\n"
        "    process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)\n"
        "    process.stdout.readline()\n"
    )
    outcome = run_tests.pytest(
        "sample", str(tmp_path), "-q", "-c", os.devnull, "--rootdir", str(tmp_path)
    )
    # The clock of /proc has ticks of 10 ms.
    assert 1.9 < outcome.report.cpu_s["test_sample"] < outcome.cpu_s


MODULE = """\
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(4))
def test_one(number):
    with open({log!r}, "a") as file:
        print({group!r}, os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_every_test_of_a_group_runs_in_one_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for group, modules in (("local", GROUPS["local"][:2]), ("alone.py", ("test_alone.py",))):
        for module in modules:
            (tmp_path / module).write_text(MODULE.format(log=str(log), group=group))
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_xdist_make_scheduler\n"
    )
    options = ["-n2", "--dist=loadscope", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    argv = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    environ = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}  # as in test_conditions.py
    subprocess.run(argv, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=200)
    ran = log.read_text().splitlines()
    assert len(ran) == 12
    # A group's tests ran in several workers.
    assert len(set(ran)) == 2


def test_the_groups_name_modules_that_exist() -> None:
    modules = {path.name for path in (ROOT / "tests" / "e2e").glob("test_*.py")}
    assert {module for members in GROUPS.values() for module in members} <= modules
    assert set(LONGEST) <= modules | GROUPS.keys()
    assert {Path(path).name for path in ON_DEBIAN_12} <= modules
