"""The files that scripts/lint checks for older Pythons."""

from __future__ import annotations

from pathlib import Path

from scripts.old_pythons import files_by_version


def test_files_by_version_takes_the_oldest_of_several_patterns(tmp_path: Path) -> None:
    for name in ("node/rank.py", "node/job.py", "node/deep/other.py", "main.py"):
        path = tmp_path / "payload" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    patterns = {
        "**/{rank,probe}.py": "py37",
        "payload/node/*.py": "py38",
        "payload/**/*.py": "py39",
    }
    assert files_by_version(tmp_path, patterns) == {
        "3.6": ["payload/node/rank.py"],
        "3.8": ["payload/node/job.py"],
        "3.9": ["payload/main.py", "payload/node/deep/other.py"],
    }
