"""Record the share of each test module in a test run, and report modules that take much longer than
recorded.

`make test` writes the seconds of each module to build/durations.json; `make durations` records them
in tests/durations.json, in percent of all unit tests or of all end-to-end tests. A share hardly
depends on the speed
or the load of the machine, but it varies: a module over its budget is reported, and the run does
not fail.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST_RUN = ROOT / "build" / "durations.json"
RECORD = ROOT / "tests" / "durations.json"
# A module may take this many times its recorded share.
BUDGET = 2
# Modules with a smaller share, in percent, have no budget.
FLOOR = 1.0
# The most modules without a record that are listed by name.
FEW = 10


def read(path: Path) -> dict[str, float]:
    """Return the durations in a file. Empty if the file does not exist."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(path: Path, durations: Mapping[str, float]) -> None:
    """Write durations, with a line for each module."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(durations, indent=0, sort_keys=True) + "\n")


def seconds_of(report: Path) -> dict[str, float]:
    """Return the seconds of each module in a JUnit report: setup, call and teardown of its
    tests.
    """
    seconds: dict[str, float] = defaultdict(float)
    cases = ET.parse(report).getroot().iter("testcase") if report.exists() else ()  # noqa: S314  (pytest's)
    for case in cases:
        folders, test, rest = case.get("classname", "").partition(".test_")
        if test:
            module = f"{folders}{test}{rest.partition('.')[0]}".replace(".", "/") + ".py"
            seconds[module] += float(case.get("time", "0"))
    return dict(seconds)


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each module's share of tests/unit or tests/e2e, in percent."""
    totals: dict[str, float] = defaultdict(float)
    for module, value in seconds.items():
        totals[_part(module)] += value
    return {module: 100 * value / (totals[_part(module)] or 1) for module, value in seconds.items()}


def _part(module: str) -> str:
    return "/".join(module.split("/")[:2])


def findings(seconds: Mapping[str, float], recorded: Mapping[str, float]) -> Iterator[str]:
    """Yield lines about modules over their budget, the longest first, and about modules without a
    record.
    """
    shares = shares_of(seconds)
    for module, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share > max(FLOOR, BUDGET * recorded.get(module, share)):
            yield f"{module}: {share:.1f} % of {_part(module)}, recorded {recorded[module]:.1f} %"
    if missing := sorted(shares.keys() - recorded.keys()):
        more = f" and {len(missing) - FEW} more" if len(missing) > FEW else ""
        yield f"no recorded duration: {', '.join(missing[:FEW])}{more}"


def renewed(seconds: Mapping[str, float], recorded: Mapping[str, float]) -> dict[str, float]:
    """Return the shares to record. A recorded share stays if the new share differs by less than a
    quarter.

    Otherwise every run would change every line of the file.
    """
    result = {}
    for module, share in shares_of(seconds).items():
        old = recorded.get(module, -1.0)
        result[module] = old if abs(share - old) < max(0.1, old / 4) else round(share, 1)
    return result


def report(seconds: Mapping[str, float]) -> list[str]:
    """Write the durations of a run for `make durations`. Return the findings about them."""
    write(LAST_RUN, {module: round(value, 2) for module, value in seconds.items()})
    return list(findings(seconds, read(RECORD)))


if __name__ == "__main__":
    if not LAST_RUN.exists():
        raise SystemExit("there are no durations to record: run `make test` first")
    write(RECORD, renewed(read(LAST_RUN), read(RECORD)))
