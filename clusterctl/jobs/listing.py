"""The files of a user's folder: in a git work tree, those that git shows; otherwise all."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.spec.program import repository_of
from clusterctl.util.process import run_for_bytes

# A repository may name programs that git runs.
GIT: Final = (
    *("git", "--no-optional-locks"),
    *("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}"),
)
_SHOWN: Final = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
# git sets these variables for its hooks. They would select another repository.
_OF_HOOKS: Final = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX"}
)
_NEVER: Final = ".git"


@dataclass(slots=True)
class FolderListing:
    """The paths in a folder, which ``paths`` yields.

    is_entered: whether to list a subfolder, given its path below ``folder``.
    warnings: git's warnings.
    """

    folder: Path
    is_entered: Callable[[str], bool]
    warnings: list[str] = field(default_factory=list)
    _known: dict[str, bool] = field(default_factory=dict)

    def paths(self, top: str = "", *, by_git: bool) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files, links and folders below the subfolder ``top``: paths below ``folder``,
        and the status of each. Nothing below a link is listed.

        by_git: list only what git shows, in each git work tree at, above or below ``top``. A
            submodule, and a repository in another, is listed as a work tree of its own.

        Raises:
            OSError: a folder can't be read.
            UsageError: git does not list a work tree.
        """
        pending = [(top, by_git and repository_of(self.folder / top) is not None)]
        while pending:
            parent, is_shown_by_git = pending.pop()
            entries = self._shown(parent) if is_shown_by_git else self._entries(parent)
            for path, status in entries:
                if stat.S_ISDIR(status.st_mode):
                    if not self.enters(path):
                        continue
                    is_work_tree = os.path.lexists(self.folder / path / _NEVER)
                    pending.append((path, by_git and is_work_tree))
                yield path, status

    def _entries(self, parent: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            entries = list(os.scandir(self.folder / parent))
        except FileNotFoundError:
            # Another program removed it just now.
            return
        for entry in entries:
            if entry.name == _NEVER:
                continue
            try:
                yield os.path.join(parent, entry.name), entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue

    def _shown(self, parent: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files that git shows in a folder, without deleted files."""
        for name in self._names(self.folder / parent):
            # A repository in another has a slash at its end.
            path = os.path.join(parent, name.rstrip("/"))
            # git also knows files in a folder that has become a link.
            if not self.enters(os.path.dirname(path)):
                continue
            try:
                status = os.lstat(self.folder / path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            yield path, status

    def _names(self, folder: Path) -> list[str]:
        env = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
        try:
            output, result = run_for_bytes([*GIT, "-C", str(folder), *_SHOWN], env=env)
        except FileNotFoundError as exc:
            raise _not_listed(folder, "git is not installed", "install git") from exc
        if result.rc:
            fix = f"make `git -C {shlex.quote(str(folder))} status` work"
            raise _not_listed(folder, result.reason, fix)
        self.warnings += result.stderr.splitlines()
        return [os.fsdecode(name) for name in output.split(b"\0")[:-1]]

    def enters(self, path: str) -> bool:
        """Return whether a path is a folder, not below a link, that is listed."""
        if path not in self._known:
            is_folder = not path or (
                self.enters(os.path.dirname(path))
                and stat.S_ISDIR(self._mode(path))
                and self.is_entered(path)
            )
            self._known[path] = is_folder
        return self._known[path]

    def _mode(self, path: str) -> int:
        try:
            return os.lstat(self.folder / path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _not_listed(folder: Path, why: str, fix: str) -> UsageError:
    return UsageError(
        f"git does not list the files of {folder}",
        code="tool-failed",
        about="git",
        where=str(repository_of(folder)),
        why=why,
        fix=f"{fix}; or use --folder none to send only the script",
    )
