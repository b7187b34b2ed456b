"""`make test` and its like: results are added up, and groups of tests stay together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run_tests
from tests.support.groups import GROUPS, LONGEST

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path) -> run_tests.Outcome:
    """Run the tests in a folder as a part."""
    report = folder / "report.xml"
    options = ("-q", "-c", os.devnull, "--rootdir", str(folder))
    with run_tests.beside(
        "unit", run_tests.pytest_argv(report, str(folder), *options), report
    ) as outcome:
        return outcome()


def test_the_test_command_adds_up_what_pytest_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_sample.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_good(): pass\n"
        "def test_bad(): raise ValueError\n"
        "def test_error(broken): pass\n"
        "def test_skipped(): pytest.skip()\n"
    )
    outcome = run(tmp_path)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)
    run_tests.show([outcome, run_tests.Outcome("lint", passed=1)])
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 2 failed"


def test_a_part_that_ends_without_a_failed_test_has_failed(tmp_path: Path) -> None:
    """There is no test; then pytest itself dies after a test that passed."""
    assert (run(tmp_path).passed, run(tmp_path).failed) == (0, 1)
    (tmp_path / "test_sample.py").write_text("def test_good(): pass\n")
    (tmp_path / "conftest.py").write_text("def pytest_unconfigure(): raise SystemExit(3)\n")
    assert (run(tmp_path).passed, run(tmp_path).failed) == (1, 1)


@pytest.mark.parametrize(
    ("path", "is_changed"),
    [
        ("payload/__main__.py", True),
        ("tests/integration/payload/test_payload_zero.py", True),
        ("requirements/dev.lock", True),
        ("payload.md", False),
        ("clusterctl/cli/jobs.py", False),
    ],
)
def test_kind_runs_before_a_commit_if_one_of_its_inputs_has_changed(
    path: str, is_changed: bool
) -> None:
    kind = ("tests/integration/payload",)
    assert run_tests.is_changed(kind, [path]) is is_changed
    assert run_tests.is_changed(kind, None)


def test_changed_files_are_those_of_the_branch_and_of_no_commit(tmp_path: Path) -> None:
    assert run_tests.changed_files(tmp_path) is None

    def git(*argv: str) -> None:
        words = ("git", "-c", "user.name=ada", "-c", "user.email=ada@localhost", *argv)
        subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    git("init", "--quiet", "--initial-branch=main")
    git("commit", "--quiet", "--allow-empty", "--message=first")
    git("switch", "--quiet", "--create", "other")
    for name in ("committed", "new"):
        (tmp_path / name).write_text(name)
        if name == "committed":
            git("add", name)
            git("commit", "--quiet", "--message=second")
    assert {*(run_tests.changed_files(tmp_path) or ())} >= {"committed", "new"}


def test_kinds_name_files_that_exist() -> None:
    for kind, inputs in run_tests.KINDS.items():
        assert all((ROOT / path).exists() for path in (*kind, *inputs))


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
