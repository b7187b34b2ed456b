"""The project of a user's script: the folder sent with it, and the folder where it starts."""

from __future__ import annotations

import ast
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError, excluded
from clusterctl.scheduler.user_script import MAX_BYTES
from clusterctl.spec.job import JobSpec, Project
from clusterctl.spec.names import PROJECT_FILES
from clusterctl.spec.program import (
    absolute_path,
    holds_package,
    import_roots,
    is_file,
    is_python,
    module_root,
    repository_of,
)

_SHELL_WORDS: Final = re.compile(r"[^\s'\"`;|&()<>$={}]+")
_MOST_MODULES: Final = 200


def with_project(job: JobSpec, here: Path) -> JobSpec:
    """Return the job with its project. ``here``: the folder in which the user starts the program.

    Raises UsageError if the option --folder names no folder that contains the script, or a module's
    package can't be sent.
    """
    if job.script is None or job.folder is False:
        if job.run_module is not None:
            raise excluded("-m", "--no-folder")
        return job
    here = absolute_path(here)
    chosen = _chosen_folder(job.folder, job.script) if isinstance(job.folder, Path) else None
    uses = _Uses.of(job, here, chosen)
    folder = chosen or uses.project()
    script = os.path.relpath(job.script, folder)
    if script.startswith("../"):
        script = os.path.relpath(job.script.parent.resolve() / job.script.name, folder.resolve())
    roots = [os.path.relpath(root, folder) for root in uses.roots if root.is_relative_to(folder)]
    if job.run_module is not None and not uses.roots[0].is_relative_to(folder):
        raise UsageError(
            f"the module {job.run_module} can't be sent with the job",
            code="folder-unfit",
            where=str(uses.roots[0]),
            why=project_obstacle(uses.roots[0]) or f"only {folder} would be sent",
            fix="move the project into a separate folder without symbolic links, or select it "
            "with --folder",
        )
    project = Project(folder, script, _start(folder, here), tuple(dict.fromkeys(roots)))
    return job.model_copy(update={"project": project})


def folder_project(folder: Path) -> Project:
    """Return the project of a folder sent without a script, for `clusterctl shell --folder`.

    Raises UsageError if the folder does not exist or can't be sent.
    """
    folder = _chosen_folder(folder, folder / "script")
    roots = [os.path.relpath(root, folder) for root in import_roots(folder) if root.is_dir()]
    return Project(folder, ".", _start(folder, Path.cwd()), tuple(roots))


def _start(folder: Path, here: Path) -> str:
    """Return the path below ``folder`` of the folder in which the program starts: ``here`` if it is
    sent.
    """
    # A path through a symbolic link would lead to the link, not to the folder.
    inner = here.resolve()
    outer = folder.resolve()
    is_sent = inner.is_relative_to(outer) and not project_obstacle(folder)
    return os.path.relpath(inner, outer) if is_sent else "."


def project_obstacle(folder: Path) -> str:
    """Return why a folder must not be sent, such as "your home folder"; "" if it can be sent."""
    if folder == folder.parent:
        return "the root of the file system"
    # Unlike Path.home, this never raises.
    home = Path(os.path.expanduser("~"))
    if folder.resolve() == home.resolve():
        return "your home folder"
    if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH | stat.S_ISVTX:
        return "a folder that all users share"
    return ""


def _chosen_folder(folder: Path, script: Path) -> Path:
    folder = absolute_path(folder)
    problem = "it is not a folder" if not folder.is_dir() else project_obstacle(folder)
    if not problem and not script.parent.resolve().is_relative_to(folder.resolve()):
        problem = f"the script {script} does not lie in it"
    if problem:
        raise UsageError(
            f"--folder {folder} can't be sent with the job",
            code="folder-unfit",
            why=problem,
            fix="name the folder of a project; for a job it must contain the script",
        )
    return folder


@dataclass(frozen=True, slots=True)
class _Uses:
    """The files and packages outside of the script's folder that its text and its arguments name.

    folders: the script's folder and those above, up to the current folder or the repository's root.
    highest: index in ``folders`` of the first folder that contains all of them.
    roots: folders from which packages are imported, first that of the module which the job runs.
    """

    folders: Sequence[Path]
    here: Path
    highest: int
    roots: Sequence[Path]

    @classmethod
    def of(cls, job: JobSpec, here: Path, chosen: Path | None) -> _Uses:
        script = job.script or Path()
        folders = _folders(script, chosen or here)
        text = _Text.read(script)
        highest = 0
        roots = list[Path]()
        if job.run_module is not None:
            roots = [root := module_root(job.run_module, script)]
            highest = folders.index(root) if root in folders else 0
        for name in sorted(text.imports - sys.stdlib_module_names):
            pairs = ((n, root) for n, folder in enumerate(folders) for root in import_roots(folder))
            number, root = next(
                ((n, r) for n, r in pairs if holds_package(r, name)), (0, script.parent)
            )
            highest = max(highest, number)
            if root != script.parent:
                roots.append(root)
        if here in folders:
            arguments = (part for word in job.args for part in word.split("="))
            words = {*arguments, *(word for word in text.words if "/" in word or "." in word)}
            if any(
                _is_file_of(here, word) and not _is_file_of(script.parent, word) for word in words
            ):
                highest = max(highest, folders.index(here))
        return cls(folders, here, highest, roots)

    def project(self) -> Path:
        """Return the nearest folder that contains all of them, preferably the root of a project."""
        if not self.highest:
            return self.folders[0]
        last = self.folders.index(self.here) if self.here in self.folders[self.highest :] else None
        candidates = self.folders[self.highest :][
            : None if last is None else last - self.highest + 1
        ]
        marked = (
            folder
            for folder in candidates
            if any((folder / name).exists() for name in PROJECT_FILES)
        )
        return next(marked, candidates[0] if last is None else self.here)


def _folders(script: Path, top: Path) -> list[Path]:
    """Return the folders from the script's up to ``top``, or the repository's root if higher."""
    above = [script.parent, *script.parent.parents]
    tops = [
        above.index(folder) for folder in (top, repository_of(script.parent)) if folder in above
    ]
    folders = []
    for folder in above[: max(tops, default=0) + 1]:
        if project_obstacle(folder):
            break
        folders.append(folder)
        # The script is not sent from behind a link.
        if folder.is_symlink():
            break
    return folders or [script.parent]


def _is_file_of(folder: Path, word: str) -> bool:
    """Return whether a word is the relative path of a file or folder in ``folder``."""
    path = os.path.normpath(word)
    return word.isprintable() and not path.startswith((".", "/")) and os.path.lexists(folder / path)


@dataclass(slots=True)
class _Text:
    """The names in programs: top-level names of imported packages, and words that may be paths."""

    imports: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, script: Path) -> _Text:
        """Read a script, and the modules beside it that it imports."""
        text = cls()
        if not is_python(script):
            tokens = _SHELL_WORDS.findall(_content(script))
            text.words.update(tokens)
            names = (name for flag, name in pairwise(tokens) if flag == "-m")
            text.imports.update(name.partition(".")[0] for name in names)
            return text
        pending = [script]
        seen = {script}
        while pending and len(seen) < _MOST_MODULES:
            for name in text._add(pending.pop()):
                files = {script.parent / f"{name}.py", *script.parent.glob(f"{name}/*.py")}
                modules = [file for file in files - seen if is_file(file)]
                pending += modules
                seen.update(modules)
        # The script's folder comes first in sys.path.
        text.imports -= {name for name in text.imports if holds_package(script.parent, name)}
        return text

    def _add(self, file: Path) -> Iterator[str]:
        """Add the names in a Python file. Yield the packages that it imports."""
        try:
            tree = ast.parse(_content(file))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    names = [module]
                case ast.Constant(value=str(value)):
                    self.words.add(value)
                    continue
                case _:
                    continue
            for name in names:
                self.imports.add(top := name.partition(".")[0])
                yield top


def _content(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
