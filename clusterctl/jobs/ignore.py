"""Rules of what is left out of a folder: .gitignore files, and patterns written like theirs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from clusterctl.errors import UsageError

GITIGNORE = ".gitignore"

# `x/**` is what lies below x, not x itself, which pathspec would leave out with it.
_BELOW = re.compile(r"/\*\*(\s*)$")


@dataclass(frozen=True, slots=True)
class Ignore:
    """The rules of one .gitignore-like list. ``folder`` is where it lies, below which it counts."""

    folder: Path
    spec: GitIgnoreSpec

    def says(self, path: Path, *, is_folder: bool) -> bool | None:
        """Whether a path is ignored; None where no line is about it."""
        name = f"{path.relative_to(self.folder)}{'/' if is_folder else ''}"
        return self.spec.check_file(name).include


def patterns(flag: str, lines: Sequence[str], folder: Path) -> Ignore:
    """The patterns of a flag, which count from ``folder``.

    Raises:
        UsageError: one can't be understood.
    """
    for line in lines:
        if _spec([line]) is None:
            raise UsageError(f"{flag}: {line} is not a pattern", fix="write it as in a .gitignore file")
    return Ignore(folder, _spec(lines) or GitIgnoreSpec([]))


def read_gitignore(file: Path, folder: Path) -> Ignore | None:
    """The rules of a file, counting from ``folder``; None if there is no such file.

    A line that can't be understood counts for nothing, as in git.

    Raises:
        OSError: it can't be read.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    spec = _spec(lines)
    if spec is None:
        spec = _spec([line for line in lines if _spec([line]) is not None])
    return Ignore(folder, spec or GitIgnoreSpec([]))


def rules_above(folder: Path) -> tuple[Ignore, ...]:
    """What the repository around ``folder`` says of it, the outermost first; nothing if it ignores it whole.

    Raises:
        OSError: a file can't be read.
    """
    root = next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    if root is None:
        return ()
    exclude = read_gitignore(_git_folder(root) / "info" / "exclude", root)
    found = [] if exclude is None else [exclude]
    way = [path for path in folder.parents if path.is_relative_to(root)]
    found += [rules for path in reversed(way) if (rules := read_gitignore(path / GITIGNORE, path))]
    whole = (*reversed(way), folder)[1:]
    ignored = any(is_ignored(found, path, is_folder=True) for path in whole)
    return () if ignored else tuple(found)


def is_ignored(rules: Sequence[Ignore], path: Path, *, is_folder: bool) -> bool:
    """Whether a path is ignored: the innermost rule that is about it counts."""
    for one in reversed(rules):
        if path.is_relative_to(one.folder) and path != one.folder:
            said = one.says(path, is_folder=is_folder)
            if said is not None:
                return said
    return False


def _git_folder(root: Path) -> Path:
    """The repository's own folder; in a worktree of git's, `.git` is a file that leads there."""
    git = root / ".git"
    if git.is_dir():
        return git
    lead = git.read_text(errors="surrogateescape").removeprefix("gitdir:").strip()
    own = root / lead
    try:
        return own / (own / "commondir").read_text(errors="surrogateescape").strip()
    except FileNotFoundError:
        return own


def _spec(lines: Sequence[str]) -> GitIgnoreSpec | None:
    try:
        with _quietly():
            return GitIgnoreSpec.from_lines(_BELOW.sub(r"/**/*\1", line) for line in lines)
    except (ValueError, re.error):
        return None


@contextmanager
def _quietly() -> Iterator[None]:
    """Python warns of brackets in the expressions that pathspec makes of patterns such as a[[:alpha:]]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
