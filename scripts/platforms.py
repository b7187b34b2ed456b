"""Write docs/platforms.md: the platforms that tests run on for real, on a stand-in, or only render
files for.

The source are markers of tests, such as ``@pytest.mark.platform("stand-in", "rocky-9")``, and the
descriptions in scripts/platforms.toml.
"""

from __future__ import annotations

import ast
import itertools
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "platforms.md"
TABLE: Final = Path(__file__).with_name("platforms.toml")
FACTS: Final = ROOT / "tests" / "unit" / "packages" / "facts"
WAYS: Final = ("real", "stand-in", "rendered")
HEAD: Final = """\
# Platforms

<!-- Written by scripts/platforms.py from scripts/platforms.toml and the tests' markers: `make reference`. -->

This page lists the platforms that tests ran on for real, on a stand-in, or not at all. A *stand-in* is a
program or a machine of the tests that imitates the named platform, as far as its documentation and source
tell. *Only rendered* means that files or requests were written and compared, but never used.

Each cell lists the tests, which run in `make test-all`.

**Nothing has run on Google Cloud, or on Rocky Linux or Ubuntu yet. On a GPU, only the training program ran.**
"""
COLUMNS: Final = ("platform", "versions", "for real", "on a stand-in", "only rendered", "not shown")


UNCONFIRMED: Final = """\
## Package names

The name of every package that a role installs is recorded with a source and a date in
[tests/unit/packages/facts](../tests/unit/packages/facts). The units, programs and folders that a role expects
from these packages are confirmed for Debian 12 and 13. For Rocky Linux, Ubuntu and NVIDIA's packages they are
unconfirmed, because these packages could not be examined. No source was found for these package names:
"""


@cache
def page(root: Path = ROOT) -> str:
    """Return the text of docs/platforms.md. root: folder with the folder tests.

    Raises:
        ValueError: a marker names a platform that platforms.toml lacks, or a way that ``WAYS``
            lacks.
    """
    listed: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["platform"]
    proofs = _proofs(root)
    unknown = proofs.keys() - set(itertools.product(WAYS, (one["id"] for one in listed)))
    if unknown:
        raise ValueError(f"no such platform or way: {sorted(unknown)}")
    parts = [HEAD]
    for group, platforms in itertools.groupby(listed, key=lambda one: one["group"]):
        parts += [f"## {group}\n", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        parts += [*(_line(_cells(one, proofs)) for one in platforms), ""]
    return "\n".join([*parts, UNCONFIRMED, *_unconfirmed(), ""])


def _cells(
    platform: Mapping[str, Any], proofs: Mapping[tuple[str, str], list[Path]]
) -> Sequence[str]:
    ran = [_listed(proofs.get((way, platform["id"]), [])) for way in WAYS]
    missing = platform.get("missing", "")
    never = "" if any(ran) else "**never ran**: "
    return [platform["name"], platform["versions"], *ran, never + missing]


def _listed(tests: Iterable[Path]) -> str:
    return ", ".join(f"[{test.stem.removeprefix('test_')}](../{test})" for test in tests)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _unconfirmed() -> Iterator[str]:
    """Yield a line for each release with its unconfirmed package names."""
    found: dict[str, set[str]] = defaultdict(set)
    for facts in FACTS.glob("*.toml"):
        for one in tomllib.loads(facts.read_text()).get("unconfirmed", ()):
            for release in one["of"]:
                found[release].update(name.partition("=")[0] for name in one["names"].split())
    for release, names in sorted(found.items()):
        yield f"- {release}: {', '.join(f'`{name}`' for name in sorted(names))}"


def _proofs(root: Path) -> Mapping[tuple[str, str], list[Path]]:
    """Return (way, platform) -> the test files with this marker, in the order of their paths."""
    found: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for test in sorted((root / "tests").rglob("test_*.py")):
        for key in dict.fromkeys(_markers(test)):
            found[key].append(test.relative_to(root))
    return found


def _markers(test: Path) -> Iterator[tuple[str, str]]:
    """Yield (way, platform) of each marker."""
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.platform":
            way, *platforms = map(ast.literal_eval, node.args)
            yield from ((way, one) for one in platforms)


if __name__ == "__main__":
    PAGE.write_text(page())
