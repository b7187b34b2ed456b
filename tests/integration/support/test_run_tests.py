"""`make test` and its like: results are added up, and CI runs the tests of the tests when these may
fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.harness.repository import commit, git

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
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)


def test_a_part_that_names_no_test_has_failed(tmp_path: Path) -> None:
    nothing = run_tests.pytest(
        "sample", str(tmp_path), "-q", "-c", os.devnull, "--rootdir", str(tmp_path)
    )
    assert (nothing.passed, nothing.failed) == (0, 1)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with CI's script, two commits on the main branch, and a `make` that notes its
    targets.
    """
    root = tmp_path / "checkout"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", root / ".ci")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "$1" >>"$MADE"\ntest "$1" != "$FAILING"\n')
    make.chmod(0o755)
    git(root, "init", "-q")
    commit(root, "README.md")
    commit(root, "docs/jobs.md")
    return root


def ci(root: Path, *argv: str, failing: str = "") -> tuple[int, list[str]]:
    """CI's exit code, and the targets that it made."""
    made = root.parent / "made"
    made.unlink(missing_ok=True)
    path = f"{root.parent / 'bin'}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "MADE": str(made), "FAILING": failing}
    code = subprocess.run(
        [root / ".ci" / "run", *argv], env=environ, check=False, timeout=60
    ).returncode
    return code, made.read_text().split()


BOTH = ["test", "test-support"]


@pytest.mark.parametrize(
    ("name", "targets"),
    [("tests/support/new.py", BOTH), ("scripts/lint", BOTH), ("clusterctl/x.py", ["test"])],
)
def test_ci_tests_the_tests_if_a_branch_changed_them(
    checkout: Path, name: str, targets: list[str]
) -> None:
    git(checkout, "checkout", "-q", "-b", "branch")
    commit(checkout, name)
    commit(checkout, "docs/runs.md")
    assert ci(checkout, "main") == (0, targets)


@pytest.mark.parametrize(
    ("name", "targets"), [("tests/support/new.py", BOTH), ("clusterctl/x.py", ["test"])]
)
def test_ci_on_the_main_branch_looks_at_the_last_commit(
    checkout: Path, name: str, targets: list[str]
) -> None:
    commit(checkout, name)
    assert ci(checkout, "main") == (0, targets)
    # An earlier commit is compared with.
    assert ci(checkout, "HEAD^^")[1] == targets


def test_ci_tests_the_tests_if_it_can_t_tell(checkout: Path, tmp_path: Path) -> None:
    assert ci(checkout, "no-such-commit") == (0, BOTH)
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{checkout}", "shallow")
    assert ci(tmp_path / "shallow") == (0, BOTH)


@pytest.mark.parametrize("failing", BOTH)
def test_ci_fails_if_one_of_them_does(checkout: Path, failing: str) -> None:
    assert ci(checkout, "no-such-commit", failing=failing) == (1, BOTH)


ROOT = Path(__file__).parents[3]
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
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=200)
    ran = log.read_text().splitlines()
    assert len(ran) == 12
    # A group's tests ran in several workers.
    assert len(set(ran)) == 2


def test_the_groups_name_modules_that_exist() -> None:
    modules = {path.name for path in (ROOT / "tests" / "e2e").glob("test_*.py")}
    assert {module for members in GROUPS.values() for module in members} <= modules
    assert set(LONGEST) <= modules | GROUPS.keys()
    assert {Path(path).name for path in ON_DEBIAN_12} <= modules
