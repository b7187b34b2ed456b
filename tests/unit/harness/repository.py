"""A repository of git for a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

_GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")


def git(root: Path, *argv: str) -> None:
    subprocess.run([*_GIT, *argv], cwd=root, check=True, timeout=60)


def commit(root: Path, name: str) -> None:
    """Commit a file of this name, and all else that has changed."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("changed\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", name)
