"""Run the tests of a Makefile target, continue after failures, and print the totals.

There are two levels:

- `make test`: the linters, all unit tests, the integration tests, and stories on local nodes, own
  machines and an attached site. Of the integration tests, ``KINDS`` run only on a branch that
  changes their inputs.
- `make test-all`: each behaviour once on each platform: `make test`, then `make test-rest`.

The last line is `N passed, N failed`. A part that fails without a failed test, or reaches its time
limit, counts as a failure. Ctrl-C, SIGTERM and a closed terminal end all processes that were
started. The next run removes the leftovers of a killed run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

from clusterctl.util.process import under_subreaper

ROOT = Path(__file__).resolve().parent.parent
UNIT = "tests/unit"
INTEGRATION = "tests/integration"
E2E = "tests/e2e"
SUPPORT = f"{INTEGRATION}/support"
# Folders of integration tests with a contract of their own, so that a change elsewhere rarely
# reaches them -> the files and folders that decide their results, besides ``_OF_ALL``.
KINDS: dict[tuple[str, ...], tuple[str, ...]] = {
    # The payload imports nothing of clusterctl, and has links to these files.
    (f"{INTEGRATION}/payload",): (
        "payload",
        "benchmarks",
        "clusterctl/scheduler/history.py",
        "tests/support/payload.py",
        "tests/support/doubles",
    ),
    (f"{INTEGRATION}/gcp", f"{INTEGRATION}/terraform"): (
        "terraform",
        "clusterctl/providers/gcp",
        "clusterctl/spec",
        "tests/support/google",
        "tests/support/terraform.py",
        "tests/unit/gcp",
    ),
    (f"{INTEGRATION}/configure", f"{INTEGRATION}/roles"): (
        "ansible",
        "clusterctl/configure",
        "clusterctl/hosts",
        "clusterctl/spec",
        # ansible/module_utils has links to files of it.
        "clusterctl/util",
        "tests/support/plays.py",
    ),
    (f"{INTEGRATION}/existing",): (
        "clusterctl/providers/existing",
        "clusterctl/packages",
        "clusterctl/scheduler",
        "clusterctl/transport",
    ),
    (f"{INTEGRATION}/transport",): (
        "clusterctl/transport",
        "clusterctl/util",
        "tests/support/sshd.py",
    ),
    (f"{INTEGRATION}/report_page",): ("clusterctl/runs", "templates", "tests/unit/runs"),
    (f"{INTEGRATION}/packages",): (
        "clusterctl/packages",
        "clusterctl/spec",
        "tests/support/wheels.py",
        "tests/unit/packages",
    ),
}
_OF_ALL = ("requirements", "tests/conftest.py", f"{INTEGRATION}/conftest.py")
# All tests wait about as long as they compute: for clusters, or for programs that they start. If all
# need a core, the clusters get it first, then the other tests, then the linters.
CORES = len(os.sched_getaffinity(0))
NICE = {"end to end": 0, "unit": 10, "lint": 19}
# The tests of a group share a cluster, so they stay together: tests/support/groups.py.
SPREAD = ("-v", f"-n{CORES}", "--dist=loadscope", "--no-loadscope-reorder", "--durations=10")
# Each worker begins with consecutive tests, because the tests of a module share fixtures.
SPREAD_UNITS = (f"-n{2 * CORES}", "--dist=worksteal", "--durations=10")
# Time limit of a part. Each test also has its own limit.
LIMIT_S = 3 * 3600
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time for interrupted tests to remove their clusters.
GRACE_S = 60


@dataclass(frozen=True)
class Outcome:
    """The numbers of tests of a part, and its duration."""

    part: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0


Outcomes = Generator[Outcome, None, None]


@contextmanager
def beside(
    part: str, argv: list[str], report: Path | None = None, *, output: IO[str] | None = None
) -> Iterator[Callable[[], Outcome]]:
    """Run a part in the background. The yielded function waits for its end.

    report: the JUnit report that it writes. None: the part is one check. output: a file for what it
    prints, which the function prints. None: it prints at once.
    """
    began = time.time()
    with started(["nice", f"-n{NICE[part]}", *argv], grace_s=GRACE_S, output=output) as process:

        def outcome() -> Outcome:
            code = ended(process, LIMIT_S)
            end = time.time()
            if output is not None:
                # The part may have ended long ago.
                end = os.fstat(output.fileno()).st_mtime
                output.seek(0)
                print(output.read(), end="", flush=True)
            found = result_of(part, code, report)
            return replace(found, seconds=end - began)

        yield outcome


def pytest_argv(report: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", f"--junitxml={report}", *options]


def result_of(part: str, code: int, report: Path | None) -> Outcome:
    """Return the numbers of a part that ended with this exit code."""
    if report is None:
        return Outcome(part, passed=int(code == 0), failed=int(code != 0))
    result = read(part, report)
    return result if code == 0 or result.failed else replace(result, failed=1)


@contextmanager
def started(
    argv: list[str], *, grace_s: int = 0, output: IO[str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a new session. On exit, end it and its child processes."""
    with subprocess.Popen(
        under_subreaper(argv, grace_s=grace_s),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            # In its own session, the program gets no signals from the terminal.
            process.terminate()
            process.wait()


def ended(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Wait for a program. Return its exit code; 1 if it has not ended within the limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"not finished within {limit_s:g} s: {process.args!r}", flush=True)
        return 1


def remove_remains() -> None:
    """Remove the leftovers of killed tests."""
    with started([sys.executable, "-m", "tests.support.remains"]) as process:
        ended(process, 600)


def end_by_signals() -> None:
    """Make the first SIGINT, SIGTERM or SIGHUP end this program, and ignore further signals."""

    def end(number: int, _: FrameType | None) -> None:
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in ENDING:
        # nohup, or a script that starts this in the background, ignores signals.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    # If SIGCHLD is ignored, exit codes are lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def read(part: str, path: Path) -> Outcome:
    """Read a JUnit report. All is 0 if the file does not exist."""
    if not path.exists():
        return Outcome(part)
    suites = [*ET.parse(path).getroot().iter("testsuite")]  # noqa: S314  (pytest wrote it just now)
    count, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return Outcome(part, count - failed - skipped, failed, skipped)


def together(units: Sequence[str], stories: str, *, lint: bool = False) -> Outcomes:
    """Run unit and integration tests, end-to-end tests and the linters side by side.

    units: folders. stories: an expression of markers.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def background(part: str, argv: list[str], report: Path | None) -> Callable[[], Outcome]:
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            return stack.enter_context(beside(part, argv, report, output=output))

        reports = [Path(folder) / name for name in ("unit.xml", "e2e.xml")]
        behind = [background("lint", [str(ROOT / "scripts" / "lint")], None)] if lint else []
        argv = pytest_argv(reports[0], *units, *SPREAD_UNITS, "-m", "not e2e")
        behind.append(background("unit", argv, reports[0]))
        argv = pytest_argv(reports[1], E2E, *SPREAD, "-m", stories)
        with beside("end to end", argv, reports[1]) as outcome:
            yield outcome()
        for outcome in behind:
            yield outcome()


def test() -> Outcomes:
    """Run what a change can break anywhere."""
    changed = changed_files(ROOT)
    left_out = [folder for kind in KINDS if not is_changed(kind, changed) for folder in kind]
    yield from together([UNIT, *integration_folders({*left_out, SUPPORT})], "story", lint=True)
    print(
        "\nOnly in `make test-rest`, because their inputs are those of the main branch:", *left_out
    )


def rest() -> Outcomes:
    """Run what `make test-all` adds: the other stories, all kinds, and the tests of the tests."""
    yield from together(
        [SUPPORT, *(folder for kind in KINDS for folder in kind)], "e2e and not story"
    )


def everything() -> Outcomes:
    """Run every behaviour once on every platform."""
    yield from test()
    remove_remains()
    yield from rest()


def is_changed(kind: tuple[str, ...], changed: Sequence[str] | None) -> bool:
    """Return whether inputs of a kind are among the changed files. None: unknown, so they may be."""
    inputs = (*kind, *KINDS[kind], *_OF_ALL)
    return changed is None or any(
        path == given or path.startswith(f"{given}/") for path in changed for given in inputs
    )


def changed_files(root: Path) -> list[str] | None:
    """Return the files that differ from the main branch, and new ones. None: unknown, as in a
    clone without the main branch, or without git.
    """

    def git(*argv: str) -> list[str]:
        words = subprocess.check_output(
            ["git", *argv], cwd=root, text=True, stderr=subprocess.DEVNULL
        )
        return words.split("\0")

    for main in ("origin/main", "main"):
        try:
            (base,) = git("merge-base", "HEAD", main)
            changed = git("diff", "--name-only", "--no-renames", "-z", base.strip())
            return [*changed, *git("ls-files", "--others", "--exclude-standard", "-z")]
        except (OSError, subprocess.CalledProcessError):
            continue
    return None


def integration_folders(left_out: set[str]) -> list[str]:
    """Return the folders of integration tests except some."""
    folders = {
        str(path.parent.relative_to(ROOT)) for path in (ROOT / INTEGRATION).glob("*/test_*.py")
    }
    return sorted(folders - left_out)


TARGETS: dict[str, Callable[[], Outcomes]] = {
    "test": test,
    "test-rest": rest,
    "test-all": everything,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS, help="a target of the Makefile")
    target = parser.parse_args().target
    end_by_signals()
    outcomes: list[Outcome] = []
    try:
        remove_remains()
        with closing(TARGETS[target]()) as parts:
            for outcome in parts:
                outcomes.append(outcome)
    except SystemExit as exc:
        outcomes.append(Outcome("interrupted", failed=1))
        return int(exc.code or 1)
    finally:
        remove_remains()
        show(outcomes)
    return 1 if any(one.failed for one in outcomes) else 0


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each part, and the totals."""
    print()
    for one in outcomes:
        numbers = f"{one.passed:5d} passed, {one.failed:3d} failed, {one.skipped:3d} skipped"
        print(f"{one.part:<12}{numbers}  {one.seconds:7.1f} s")
    passed, failed = sum(one.passed for one in outcomes), sum(one.failed for one in outcomes)
    print(f"\n{passed} passed, {failed} failed")


if __name__ == "__main__":
    sys.exit(main())
