"""The scope page: every row has one of the five states and a reason, and nothing stands there twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "docs" / "scope.md").read_text()
STATES = {"done", "partly", "planned", "adapted", "out"}


def rows() -> list[list[str]]:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "named"]


def test_every_row_has_a_state_and_a_reason() -> None:
    assert len(rows()) > 100
    bad = [row for row in rows() if len(row) != 3 or row[1] not in STATES or not row[0] or not row[2]]
    assert bad == []
    assert [row for row in rows() if row[1] == "partly" and "Missing: " not in row[2]] == []


def test_nothing_stands_there_twice() -> None:
    assert [name for name, count in Counter(row[0] for row in rows()).items() if count > 1] == []
