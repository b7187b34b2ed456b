"""The table of docs/testing.md names all modules of tests, on the level that they are on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "testing.md"
LEVELS = ("unit", "integration", "e2e")


def rows() -> list[list[str]]:
    """Return the cells of each row of the tables, without their headings."""
    lines = [line for line in PAGE.read_text().splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if row[0] not in {"behaviour", "---"}]


def named(level: str) -> set[str]:
    """Return the names in the table's column of a level."""
    column = 1 + LEVELS.index(level)
    return {name for row in rows() for name in re.findall("`([^`]+)`", row[column])}


@pytest.mark.parametrize("level", LEVELS)
def test_table_of_levels_names_each_module(level: str) -> None:
    names = named(level)
    folder = ROOT / "tests" / level
    modules = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("test_*.py")}
    folders = {f"{module.rpartition('/')[0]}/" for module in modules}
    assert names - modules - folders == set()
    covered = {module for module in modules if f"{module.rpartition('/')[0]}/" in names}
    assert modules - covered - names == set()


def test_table_of_levels_has_a_reason_for_each_further_level() -> None:
    several = [row for row in rows() if sum(map(bool, row[1:4])) > 1]
    assert several
    assert [row[0] for row in several if not row[4]] == []
