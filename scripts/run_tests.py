"""Runs the linters, the unit tests and the end-to-end tests, all of them whatever fails, and adds them up.

The last line is `N passed, N failed`; a part that broke without naming a test counts as one failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A module's tests share a cluster, so they stay together; tests/e2e/conftest.py says which modules begin.
SPREAD = ("-n3", "--dist=loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True)
class Outcome:
    """What one part came to."""

    part: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def lint() -> Outcome:
    """All linters, as one check."""
    began = time.monotonic()
    clean = subprocess.run([ROOT / "scripts" / "lint"], cwd=ROOT, check=False).returncode == 0
    return Outcome("lint", int(clean), int(not clean), 0, time.monotonic() - began)


def pytest(part: str, *options: str) -> Outcome:
    """One run of pytest."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        argv = [sys.executable, "-m", "pytest", f"--junitxml={report}", *options]
        code = subprocess.run(argv, cwd=ROOT, check=False).returncode
        passed, failed, skipped = count(report)
    if code != 0 and failed == 0:
        failed = 1
    return Outcome(part, passed, failed, skipped, time.monotonic() - began)


def count(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of a JUnit report; a report that was never written has none."""
    if not report.exists():
        return 0, 0, 0
    suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314  (pytest wrote it just now)

    def total(*names: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites for name in names)

    failed, skipped = total("failures", "errors"), total("skipped")
    return total("tests") - failed - skipped, failed, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the sweeps too")
    sweeps = "" if parser.parse_args().all else " and not sweep"
    outcomes = [
        lint(),
        pytest("unit", "-n2", "--durations=10", "-m", f"not e2e{sweeps}"),
        # Real clusters wait as much as they compute: three at a time keep two cores at work.
        pytest("end to end", "-v", *SPREAD, "--durations=10", "-m", f"e2e and not alone{sweeps}"),
        pytest("alone", "-v", "-m", f"e2e and alone{sweeps}"),
    ]
    print()
    for one in outcomes:
        skipped = f", {one.skipped} skipped" if one.skipped else ""
        print(f"{one.part:<12}{one.passed:5d} passed, {one.failed:3d} failed{skipped}  {one.seconds:7.1f} s")
    failed = sum(one.failed for one in outcomes)
    print(f"{sum(one.passed for one in outcomes)} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
