"""Run the tests of a Makefile target, continue after failures, and print the totals.

`make test` runs the linters, the unit and integration tests, and the end-to-end tests side by side.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from clusterctl.util.process import under_subreaper
from scripts import changed_tests

ROOT = Path(__file__).resolve().parent.parent
UNITS = ("tests/unit", "tests/integration")
E2E = "tests/e2e"
SUPPORT = "tests/integration/support"
PEERS = f"{E2E}/test_peers.py"
# Real clusters wait about as long as they compute, and the other tests fill the gaps. If both need a
# core, the clusters get it first, then the other tests, then the linters.
CORES = len(os.sched_getaffinity(0))
UNIT_WORKERS = CORES
E2E_WORKERS = CORES
NICE = {"unit": 10, "lint": 19}
# `make test-all` runs these again on nodes with Debian 12, for its versions of Slurm, Open MPI and
# Python.
ON_DEBIAN_12 = tuple(
    f"{E2E}/test_{name}.py"
    for name in "main_job payload data own_folder jobs job_words shell submit_survival nodes "
    "no_scheduler convergence examples".split()
)
# The tests of a group share a cluster, so they stay together: tests/support/groups.py.
SPREAD = (f"-n{E2E_WORKERS}", "--dist=loadscope", "--no-loadscope-reorder")
# Each worker begins with consecutive tests, because the tests of a module share fixtures.
SPREAD_UNITS = (f"-n{UNIT_WORKERS}", "--dist=worksteal", "--durations=10")
# Time limit of a part. Each test also has its own limit.
LIMIT_S = 3 * 3600
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time for interrupted tests to remove their clusters.
GRACE_S = 60


@dataclass(frozen=True)
class Outcome:
    """The result of a part."""

    part: str
    passed: int
    failed: int
    skipped: int
    seconds: float


Outcomes = Generator[Outcome, None, None]


@contextmanager
def beside(
    part: str, argv: list[str], report: Path | None = None
) -> Iterator[Callable[[], Outcome]]:
    """Run a part in the background. The yielded function waits for its end and prints its
    output.
    """
    began = time.time()
    lower = ["nice", f"-n{NICE[part]}", *argv]
    with (
        tempfile.TemporaryFile("w+") as said,
        started(lower, grace_s=GRACE_S, output=said) as process,
    ):

        def outcome() -> Outcome:
            code = ended(process, LIMIT_S)
            # The part may have ended long ago.
            seconds = os.fstat(said.fileno()).st_mtime - began
            said.seek(0)
            print(said.read(), end="", flush=True)
            return outcome_of(part, code, report, seconds)

        yield outcome


def pytest(part: str, *options: str, nodes: str = "") -> Outcome:
    """Run pytest. ``nodes``: the distribution of local nodes. Empty: the default."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        code = run(["env", f"TEST_DISTRIBUTION={nodes}", *pytest_argv(report, *options)])
        return outcome_of(part, code, report, time.monotonic() - began)


def pytest_argv(report: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", f"--junitxml={report}", *options]


def outcome_of(part: str, code: int, report: Path | None, seconds: float) -> Outcome:
    """Return the outcome of a part from its exit code and its report. Without a report, it is one
    check.
    """
    passed, failed, skipped = count(report) if report else (int(code == 0), 0, 0)
    return Outcome(part, passed, failed or int(code != 0), skipped, seconds)


def run(argv: list[str], *, limit_s: float = LIMIT_S, grace_s: int = GRACE_S) -> int:
    """Run a program in a new session, and return its exit code. Its child processes end with it."""
    with started(argv, grace_s=grace_s) as process:
        return ended(process, limit_s)


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
    """Return the exit code of a program, or 1 if it has not ended within the limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"not finished within {limit_s:g} s: {process.args!r}", flush=True)
        return 1


def remove_remains() -> None:
    """Remove the leftovers of killed tests."""
    run([sys.executable, "-m", "tests.support.remains"], grace_s=0, limit_s=600)


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


def count(report: Path) -> tuple[int, int, int]:
    """Return the numbers of passed, failed and skipped tests in a JUnit report. 0 if it does not
    exist.
    """
    if not report.exists():
        return 0, 0, 0
    suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314  (pytest wrote it just now)

    def total(*names: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites for name in names)

    failed = total("failures", "errors")
    skipped = total("skipped")
    return total("tests") - failed - skipped, failed, skipped


def together(units: Sequence[str], stories: Sequence[str], sweeps: str, lint: bool) -> Outcomes:
    """Run unit and integration tests, end-to-end tests and the linters side by side."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        report = Path(folder) / "report.xml"
        behind = []
        if lint:
            behind.append(stack.enter_context(beside("lint", [str(ROOT / "scripts" / "lint")])))
        if units:
            argv = pytest_argv(report, *units, *SPREAD_UNITS, "-m", f"not e2e{sweeps}")
            behind.append(stack.enter_context(beside("unit", argv, report)))
        if stories:
            words = ("-v", *SPREAD, "--durations=10", "-m", f"e2e and not alone{sweeps}")
            yield pytest("end to end", *stories, *words)
        for outcome in behind:
            yield outcome()


def everything(has_sweeps: bool = False) -> Outcomes:
    """Run all tests except the tests of the tests, which only run with the sweeps."""
    sweeps = "" if has_sweeps else " and not sweep"
    yield from together([*UNITS, f"--ignore={SUPPORT}"], [E2E], sweeps, lint=True)
    remove_remains()
    if has_sweeps:
        words = ("-v", *SPREAD, "-m", "e2e and not alone and not sweep")
        yield pytest("Debian 12", *ON_DEBIAN_12, *words, nodes="debian-12")
        remove_remains()
        yield pytest("support", SUPPORT, *SPREAD_UNITS)
        # In a worker, because a hanging test may have to be killed with its process.
        yield pytest("alone", E2E, "-v", "-n1", "-m", "e2e and alone")


def changed() -> Outcomes:
    """Run the tests for the current change, for about a minute."""
    files = changed_tests.changed_files(ROOT)
    units, stories = changed_tests.choose(files, changed_tests.modules_of(ROOT))
    print(f"{len(files)} changed files:", *units, *stories, sep="\n  ", flush=True)
    yield from together(units, stories, " and not sweep", lint=False)


def support() -> Outcomes:
    """Run the tests of the tests."""
    yield pytest("support", SUPPORT, *SPREAD_UNITS)


def peers() -> Outcomes:
    """Run the test suites of other programs on a real cluster. `make test-all` includes them."""
    yield pytest("peers", PEERS, "-v", "-n1")


TARGETS: dict[str, Callable[[], Outcomes]] = {
    "test": everything,
    "test-all": partial(everything, has_sweeps=True),
    "test-changed": changed,
    "test-support": support,
    "test-peers": peers,
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
        outcomes.append(Outcome("interrupted", 0, 1, 0, 0))
        return int(exc.code or 1)
    finally:
        remove_remains()
        show(outcomes)
    return 1 if any(one.failed for one in outcomes) else 0


def show(outcomes: list[Outcome]) -> None:
    """Print a line for each part, and the totals."""
    print()
    for one in outcomes:
        skipped = f", {one.skipped} skipped" if one.skipped else ""
        print(
            f"{one.part:<12}{one.passed:5d} passed, {one.failed:3d} failed{skipped}  "
            f"{one.seconds:7.1f} s"
        )
    failed = sum(one.failed for one in outcomes)
    print(f"{sum(one.passed for one in outcomes)} passed, {failed} failed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
