"""What is recorded of the durations of test modules, and which modules a run names."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import durations

# As pytest writes it: a time is that of a test's setup, its call and its teardown.
REPORT = """\
<testsuites><testsuite name="pytest">
<testcase classname="tests.unit.x.test_a" name="test_one[1]" time="1.5" />
<testcase classname="tests.unit.x.test_a.TestIt" name="test_two" time="0.25"><skipped /></testcase>
<testcase classname="tests.e2e.test_b" name="test_one" time="20"><failure /></testcase>
<testcase classname="" name="tests.unit.x.test_c" time="0"><error /></testcase>
</testsuite></testsuites>
"""
BIG = "tests/unit/x/test_big.py"
UNIT = {BIG: 2.0} | {f"tests/unit/x/test_{n}.py": 1.0 for n in range(48)}


def test_the_seconds_of_a_module_are_those_of_its_tests(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    seconds = durations.seconds_of(tmp_path / "report.xml")
    assert seconds == {"tests/unit/x/test_a.py": 1.75, "tests/e2e/test_b.py": 20}
    assert durations.seconds_of(tmp_path / "none.xml") == {}


@pytest.mark.parametrize(
    ("big", "others", "named"),
    [
        (2.0, 1.0, []),
        (20.0, 10.0, []),  # a slower machine
        (4.3, 1.0, ["tests/unit/x/test_big.py: 8.2 % of tests/unit, recorded 4.0 %"]),
    ],
)
def test_a_module_over_twice_its_share_is_named(
    big: float, others: float, named: list[str]
) -> None:
    seconds = {**dict.fromkeys(UNIT, others), BIG: big}
    assert list(durations.findings(seconds, durations.shares_of(UNIT))) == named


def test_a_small_module_has_no_budget_and_a_new_module_is_named() -> None:
    recorded = dict.fromkeys(UNIT, 0.1) | {BIG: 97.0}
    seconds = UNIT | {BIG: 400.0, "tests/unit/x/test_1.py": 3.0}
    assert list(durations.findings(seconds, recorded)) == []
    assert list(durations.findings(seconds | {"tests/unit/y/test_new.py": 0.0}, recorded)) == [
        "no recorded duration: tests/unit/y/test_new.py"
    ]
    (line,) = durations.findings(UNIT, {})
    assert (line.count(".py"), line.rpartition(".py")[2]) == (10, " and 39 more")


def test_a_new_record_changes_few_lines(tmp_path: Path) -> None:
    old = {
        "tests/unit/x/test_a.py": 40.0,
        "tests/unit/x/test_b.py": 59.0,
        "tests/unit/x/test_gone.py": 1.0,
    }
    seconds = {
        "tests/unit/x/test_a.py": 4.5,
        "tests/unit/x/test_b.py": 4.0,
        "tests/unit/x/test_new.py": 1.55,
    }
    renewed = durations.renewed(seconds, old)
    assert renewed == {
        "tests/unit/x/test_a.py": 40.0,
        "tests/unit/x/test_b.py": 39.8,
        "tests/unit/x/test_new.py": 15.4,
    }
    durations.write(tmp_path / "durations.json", renewed)
    assert len((tmp_path / "durations.json").read_text().splitlines()) == 5
    assert durations.read(tmp_path / "durations.json") == renewed
