"""Print the files for older Pythons than clusterctl's own: on each line a version, then its files.

pyproject.toml lists the files for ruff. scripts/lint has vermin check them. If several patterns fit
a file, the oldest version counts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# ruff's name of a version -> the version. Hosts' 3.6 is older than all that ruff knows.
VERSIONS = {"py37": "3.6", "py38": "3.8", "py39": "3.9"}
_BRACES = re.compile(r"\{([^{}]+)\}")
_PARTS = ("ansible", "clusterctl", "payload")


def files_by_version(root: Path, versions: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files for each version of Python. versions: pattern -> ruff's name of the
    version.
    """
    version_of: dict[str, str] = {}
    # The oldest comes last, and so replaces the newer versions.
    for pattern, version in sorted(versions.items(), key=lambda item: item[1], reverse=True):
        for glob in _without_braces(pattern):
            for part in _PARTS:
                for path in (root / part).glob(glob.removeprefix(f"{part}/")):
                    version_of[path.relative_to(root).as_posix()] = VERSIONS[version]
    return {
        version: sorted(file for file, own in version_of.items() if own == version)
        for version in VERSIONS.values()
    }


def _without_braces(pattern: str) -> list[str]:
    """Return a pattern for each choice of words in braces."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    choices = [
        pattern[: match.start()] + word + pattern[match.end() :] for word in match[1].split(",")
    ]
    return [each for choice in choices for each in _without_braces(choice)]


def main() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["ruff"]["per-file-target-version"]
    for version, files in files_by_version(ROOT, patterns).items():
        print(version, *files)


if __name__ == "__main__":
    main()
