"""Run the tests of a Makefile target, continue after failures, and print the totals.

There are three levels:

- `make test`: the linters, all unit tests, the integration tests, and stories on local nodes, own
  machines and an attached site.
  Kinds of integration tests whose inputs are unchanged are left out (scripts/unchanged.py).
- `make test-all`: each behaviour once on each platform: `make test`, then `make test-rest`.
- `make test-sweeps`: all of it with repeats, sizes and random inputs.

At the end it prints the CPU seconds of each part and of the most expensive modules. The last line is
`N passed, N failed`. A part that fails without a failed test, or reaches its time limit, counts as a
failure. Ctrl-C, SIGTERM and a closed terminal end all processes that were started. The next run
removes the leftovers of a killed run.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO

from clusterctl.util.process import under_subreaper
from scripts import changed_tests, unchanged
from scripts.unchanged import Kind
from tests.support.cpu_time import PROPERTY

ROOT = Path(__file__).resolve().parent.parent
UNIT = "tests/unit"
INTEGRATION = "tests/integration"
E2E = "tests/e2e"
SUPPORT = f"{INTEGRATION}/support"
PEERS = f"{E2E}/test_peers.py"
# All tests wait about as long as they compute: for clusters, or for programs that they start. If all
# need a core, the clusters get it first, then the other tests, then the linters.
CORES = len(os.sched_getaffinity(0))
UNIT_WORKERS = 2 * CORES
E2E_WORKERS = CORES
NICE = {"unit": 10, "lint": 19}
# `make test-sweeps` runs these again on nodes with Debian 12, for its versions of Slurm, Open MPI and
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
# Number of modules to print with their CPU time.
EXPENSIVE = 25


@dataclass(frozen=True)
class Report:
    """What pytest reports of a part.

    cpu_s: test module -> CPU seconds of its tests. failures: test module -> number of failed tests; "":
        of failures outside of tests.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a part.

    cpu_s: CPU seconds of all its processes. Those of clusters' machines are in no test's report.
    """

    part: str
    report: Report
    seconds: float
    cpu_s: float


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
            code, cpu_s = ended(process, LIMIT_S)
            # The part may have ended long ago.
            seconds = os.fstat(said.fileno()).st_mtime - began
            said.seek(0)
            print(said.read(), end="", flush=True)
            return Outcome(part, result_of(code, report), seconds, cpu_s)

        yield outcome


def pytest(part: str, *options: str, nodes: str = "") -> Outcome:
    """Run pytest. ``nodes``: the distribution of local nodes. Empty: the default."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        argv = ["env", f"TEST_DISTRIBUTION={nodes}", *pytest_argv(report, *options)]
        with started(argv, grace_s=GRACE_S) as process:
            code, cpu_s = ended(process, LIMIT_S)
        return Outcome(part, result_of(code, report), time.monotonic() - began, cpu_s)


def pytest_argv(report: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", f"--junitxml={report}", *options]


def result_of(code: int, report: Path | None) -> Report:
    """Return the report of a part that ended with an exit code. Without a file, the part is one
    check.
    """
    if report is None:
        return Report(passed=int(code == 0), failed=int(code != 0))
    result = read(report)
    if code == 0 or result.failed:
        return result
    return replace(result, failed=1, failures={**result.failures, "": 1})


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


def ended(process: subprocess.Popen[bytes], limit_s: float) -> tuple[int, float]:
    """Wait for a program. Return its exit code and the CPU seconds of all its processes.

    The exit code is 1 if the program has not ended within the limit.
    """

    def cpu_of_waited() -> float:
        waited = resource.getrusage(resource.RUSAGE_CHILDREN)
        return waited.ru_utime + waited.ru_stime

    # It grows when a child is waited for, and only this one is.
    before = cpu_of_waited()
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"not finished within {limit_s:g} s: {process.args!r}", flush=True)
        code = 1
    return code, cpu_of_waited() - before


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


def read(path: Path) -> Report:
    """Read a JUnit report. All is 0 if the file does not exist."""
    if not path.exists():
        return Report()
    root = ET.parse(path).getroot()  # noqa: S314  (pytest wrote it just now)
    numbers: Counter[str] = Counter()
    cpu_s: dict[str, float] = defaultdict(float)
    failures: Counter[str] = Counter()
    for suite in root.iter("testsuite"):
        for name in ("tests", "failures", "errors", "skipped"):
            numbers[name] += int(suite.get(name, "0"))
    for case in root.iter("testcase"):
        module = case.get("classname", "")
        if case.find("skipped") is None:
            failures[module] += len({*case.findall("failure"), *case.findall("error")})
        for one in case.iter("property"):
            if one.get("name") == PROPERTY:
                cpu_s[module] += float(one.get("value", "0"))
    failed = numbers["failures"] + numbers["errors"]
    passed = numbers["tests"] - failed - numbers["skipped"]
    return Report(passed, failed, numbers["skipped"], cpu_s, failures)


def together(
    units: Sequence[str],
    stories: Sequence[str],
    *marks: str,
    lint: bool = False,
    has_sweeps: bool = False,
) -> Outcomes:
    """Run unit and integration tests, end-to-end tests and the linters side by side.

    marks: choose among the end-to-end tests.
    """
    cases = () if has_sweeps else ("not sweep",)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        report = Path(folder) / "report.xml"
        behind = []
        if lint:
            behind.append(stack.enter_context(beside("lint", [str(ROOT / "scripts" / "lint")])))
        if units:
            argv = pytest_argv(report, *units, *SPREAD_UNITS, *marked("not e2e", *cases))
            behind.append(stack.enter_context(beside("unit", argv, report)))
        if stories:
            words = ("-v", *SPREAD, "--durations=10")
            chosen = marked("e2e", "not alone", *marks, *cases)
            yield pytest("end to end", *stories, *words, *chosen)
        for outcome in behind:
            yield outcome()


def marked(*marks: str) -> tuple[str, str]:
    """Return the options of pytest for tests to which all these expressions apply."""
    return "-m", " and ".join(marks)


def test() -> Outcomes:
    """Run what a change can break anywhere: linters, unit and integration tests, and stories on
    clusters.
    """
    chosen = unchanged.choose(ROOT, changed_files())
    units = [UNIT, *integration_folders(chosen.left_out | {SUPPORT}), *chosen.samples]
    parts = together(units, [E2E], "story", lint=True)
    yield from recording(chosen.whole, parts)
    print("\nLeft out of the integration tests:", *(chosen.lines() or ["nothing"]), sep="\n  ")


def rest() -> Outcomes:
    """Run what `make test-all` adds: the other stories, whole kinds, and the tests of the tests."""
    whole = {kind: unchanged.content_of(ROOT, kind) for kind in unchanged.KINDS}
    units = [SUPPORT, *(folder for kind in whole for folder in kind.tests)]
    yield from recording(whole, together(units, [E2E], "not story"))


def everywhere() -> Outcomes:
    """Run every behaviour once on every platform."""
    yield from test()
    remove_remains()
    yield from rest()


def sweeps() -> Outcomes:
    """Run all tests with all their cases."""
    yield from together([UNIT, INTEGRATION], [E2E], lint=True, has_sweeps=True)
    remove_remains()
    chosen = marked("e2e", "not alone", "not sweep")
    yield pytest("Debian 12", *ON_DEBIAN_12, "-v", *SPREAD, *chosen, nodes="debian-12")
    remove_remains()
    # In a worker, because a hanging test may have to be killed with its process.
    yield pytest("alone", E2E, "-v", "-n1", *marked("e2e", "alone"))


def changed_files() -> list[str] | None:
    """Return the files that differ from the main branch. None: unknown."""
    base = changed_tests.base_of(ROOT)
    return None if base is None else changed_tests.changed_files(ROOT, base)


def integration_folders(left_out: set[str]) -> list[str]:
    """Return the folders of integration tests except some."""
    folders = sorted(path.parent for path in (ROOT / INTEGRATION).glob("*/test_*.py"))
    names = dict.fromkeys(str(folder.relative_to(ROOT)) for folder in folders)
    return [name for name in names if name not in left_out]


def recording(whole: Mapping[Kind, str], parts: Outcomes) -> Outcomes:
    """Record which of the kinds that ran whole have passed."""
    for outcome in parts:
        if outcome.part == "unit":
            unchanged.record(ROOT, whole, outcome.report.failures)
        yield outcome


def changed() -> Outcomes:
    """Run the tests for the current change: about a minute, and platforms whose files changed."""
    files = changed_tests.changed_files(ROOT, changed_tests.base_of(ROOT) or "HEAD")
    units, stories = changed_tests.choose(files, changed_tests.modules_of(ROOT))
    print(f"{len(files)} changed files:", *units, *stories, sep="\n  ", flush=True)
    yield from together(units, stories)


def peers() -> Outcomes:
    """Run the test suites of other programs on a real cluster. `make test-sweeps` includes them."""
    yield pytest("peers", PEERS, "-v", "-n1")


TARGETS: dict[str, Callable[[], Outcomes]] = {
    "test": test,
    "test-rest": rest,
    "test-all": everywhere,
    "test-changed": changed,
    "test-sweeps": sweeps,
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
        outcomes.append(Outcome("interrupted", Report(failed=1), 0, 0))
        return int(exc.code or 1)
    finally:
        remove_remains()
        show(outcomes)
    return 1 if any(one.report.failed for one in outcomes) else 0


def show(outcomes: Sequence[Outcome]) -> None:
    """Print CPU seconds by module, a line for each part, and the totals."""
    reports = [one.report for one in outcomes]
    # A module may have tests in several parts.
    cpu_s: dict[str, float] = defaultdict(float)
    for report in reports:
        for module, seconds in report.cpu_s.items():
            cpu_s[module] += seconds
    print("\nCPU seconds of the most expensive modules:")
    for module in sorted(cpu_s, key=lambda module: -cpu_s[module])[:EXPENSIVE]:
        print(f"{cpu_s[module]:8.1f}  {module}")
    print("\nCPU seconds of tests, by level:")
    for level in (UNIT, INTEGRATION, E2E):
        prefix = level.replace("/", ".")
        seconds = sum(cpu_s[module] for module in cpu_s if module.startswith(prefix))
        print(f"{seconds:8.1f}  {level}")
    print()
    for one in outcomes:
        result = one.report
        skipped = f", {result.skipped} skipped" if result.skipped else ""
        print(
            f"{one.part:<12}{result.passed:5d} passed, {result.failed:3d} failed{skipped}  "
            f"{one.seconds:7.1f} s, with all processes {one.cpu_s:7.1f} CPU s"
        )
    failed = sum(report.failed for report in reports)
    print(f"{sum(report.passed for report in reports)} passed, {failed} failed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
