"""Writes docs/platforms.md: what the tests' markers say ran for real, on a stand-in, or was only rendered.

A test says it with ``@pytest.mark.platform("stand-in", "rocky-9")``; scripts/platforms.toml describes each.
"""

from __future__ import annotations

import ast
import itertools
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "platforms.md"
TABLE: Final = Path(__file__).with_name("platforms.toml")
WAYS: Final = ("real", "stand-in", "rendered")
HEAD: Final = """\
# Platforms

<!-- Written by scripts/platforms.py from scripts/platforms.toml and the tests' markers: `make reference`. -->

What ran for real, what ran on a stand-in, and what no test shows. A *stand-in* is a program or a machine of
the tests that behaves as the named thing does, as far as its documentation and source tell. *Only rendered*
means that files or requests were written and compared, and nothing ran them. Each cell names the tests.

**Nothing has run on Google Cloud, on Rocky Linux or Ubuntu, or on a machine with a GPU yet.**
"""
COLUMNS: Final = ("platform", "versions", "for real", "on a stand-in", "only rendered", "not shown")


def page() -> str:
    """The whole page.

    Raises:
        ValueError: a test names a platform that the table lacks, or another way than ``WAYS``.
    """
    listed: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["platform"]
    proofs = _proofs()
    unknown = proofs.keys() - set(itertools.product(WAYS, (one["id"] for one in listed)))
    if unknown:
        raise ValueError(f"no such platform or way: {sorted(unknown)}")
    parts = [HEAD]
    for group, platforms in itertools.groupby(listed, key=lambda one: one["group"]):
        parts += [f"## {group}\n", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        parts += [*(_line(_cells(one, proofs)) for one in platforms), ""]
    return "\n".join(parts)


def _cells(platform: Mapping[str, Any], proofs: Mapping[tuple[str, str], list[Path]]) -> Sequence[str]:
    ran = [", ".join(map(_link, proofs.get((way, platform["id"]), []))) for way in WAYS]
    missing = platform.get("missing", "")
    never = "" if any(ran) else "**never ran**: "
    return [platform["name"], platform["versions"], *ran, never + missing]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _link(test: Path) -> str:
    return f"[{test.stem.removeprefix('test_')}](../{test.relative_to(ROOT)})"


def _proofs() -> Mapping[tuple[str, str], list[Path]]:
    """(way, platform) -> the test files that say so, in order of their paths."""
    found: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        for key in dict.fromkeys(_markers(test)):
            found[key].append(test)
    return found


def _markers(test: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.platform":
            way, *platforms = map(ast.literal_eval, node.args)
            yield from ((way, one) for one in platforms)


if __name__ == "__main__":
    PAGE.write_text(page())
