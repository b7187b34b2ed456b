"""The files of a user's project that are sent with a job."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.errors import Notice, UsageError, printable
from clusterctl.jobs.listing import FolderListing
from clusterctl.jobs.project import project_obstacle
from clusterctl.jobs.secret_files import left_out_notice, without_secrets
from clusterctl.spec.job import JobSpec
from clusterctl.state.ledger import TASK, copied_folders, is_own_report, is_run
from clusterctl.state.workspace import cache_home, state_home
from clusterctl.transport.tree import (
    Item,
    ItemKind,
    gitignore_spec,
    literal_pattern,
    unreadable_error,
)
from clusterctl.util import formatting
from clusterctl.util.confine import reject_read
from clusterctl.util.numbers import counted

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

    from clusterctl.scheduler.request.request import Request

MAX_BYTES = 10 << 30
MAX_FILES = 100_000
LARGE_BYTES = 100 << 20
LARGE_FILES = 5_000
_LEFT_OUT = frozenset({"__pycache__", "node_modules", ".ipynb_checkpoints", ".agents", ".claude"})
_LEAVE_OUT = (
    "exclude files with --exclude or a .gitignore, or copy data once with `clusterctl put PATH`"
)


class Reason(StrEnum):
    """Why a file or folder of the project is not sent."""

    PRIVATE = "it holds secrets"
    NO_SOURCE = "it holds installed, cached or collected files, or files for coding agents"


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a project to send with a job.

    notes: messages for the user. script: the path of the job's script in the folder. "": no script.
    left_out: path -> why it is not sent, of files that git shows, or that a folder without git
        has. The path of a folder ends with a slash. Without those that --exclude matches.
    """

    folder: Path
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    script: str = ""
    left_out: Mapping[str, Reason] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.kind is ItemKind.FILE)

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.items)

    def listed_again(self) -> Source:
        """Return the same files with their present sizes and times, without those that are gone."""
        items = []
        for item in self.items:
            now = item
            if item.kind is ItemKind.FILE:
                try:
                    found = Item.of(item.path, item.origin, item.origin.stat())
                except OSError:
                    found = None
                if found is not None and found.kind is ItemKind.FILE:
                    now = replace(found, mode=item.mode)
                elif item.path != self.script:
                    continue
            items.append(now)
        return replace(self, items=tuple(items))


def source_of(request: Request) -> Source | None:
    """Return the files to send with a job: its project without ignored files, or None if bundled.

    Raises:
        UsageError: a file can't be read, a link leads to a folder outside, a name is reserved for
            clusterctl, the folder is too large, or a pattern is malformed.
    """
    job = request.job
    # This call only rejects malformed patterns.
    patterns("--set outputs=", job.outputs)
    if job.script is None:
        if job.include or job.exclude:
            raise UsageError(
                "--include and --exclude apply to the folder of a script",
                about="include",
                why=f"{job.bundled} is a bundled job, which is submitted without a folder",
                fix="leave out --include and --exclude",
            )
        return None
    folder = job.place.folder
    reject_read(folder)
    obstacle = project_obstacle(folder) if job.folder else "excluded by --folder none"
    if not obstacle:
        own_folders = (state_home(), cache_home(), *copied_folders())
        selection = _Selection(
            folder,
            job.place.script,
            job.include,
            patterns("--exclude", job.exclude),
            has_tasks=bool(request.indices),
            image=None if job.container is None else Path(job.container),
            not_source=frozenset(path.resolve() for path in own_folders),
        )
        selection.run()
        selection.add_folder(job.place.start)
        source = Source(
            folder,
            tuple(selection.items),
            tuple(selection.notes),
            job.place.script,
            selection.left_out,
        )
        source = without_unnamed_secrets(source, job.include)
        unsent = _unsent_arguments(job, source)
        return replace(source, notes=(*source.notes, *unsent))
    if job.include:
        raise UsageError(
            f"--include can't select files, because the script's folder is not sent: {folder} is "
            f"{obstacle}",
            about="include-alone",
            fix="move the script and the files it needs into a separate folder"
            if job.folder
            else "leave out --folder none or --include",
        )
    try:
        item = Item.of(job.script.name, job.script, job.script.stat())
    except OSError as exc:
        raise unreadable_error([exc]) from exc
    text = (
        f"only the script is sent, not the other files of its folder, because {folder} is "
        f"{obstacle}"
    )
    note = Notice("script-sent-alone", text)
    return Source(folder, (item,) if item else (), (note,) if job.folder else ())


def without_unnamed_secrets(source: Source, include: Sequence[str]) -> Source:
    """Return a job's files without those with secrets, unless ``include`` (--include) has their
    paths. A note names them.

    Raises UsageError if a file can't be read.
    """
    named = {source.script, *map(_literal_path, include)} - {""}
    items, left_out = without_secrets(source.items, named)
    if not left_out:
        return source
    note = left_out_notice(left_out, f"use its path: {_option('--include', left_out[0])}")
    return replace(
        source,
        items=items,
        notes=(*source.notes, note),
        left_out={**source.left_out, **dict.fromkeys(left_out, Reason.PRIVATE)},
    )


def _unsent_arguments(job: JobSpec, source: Source) -> Iterator[Notice]:
    """Yield a note on the program's arguments that are paths in the project and not sent."""
    sent = {item.path for item in source.items}
    left_out = {path.rstrip("/") for path in source.left_out}
    words = dict.fromkeys(chain.from_iterable(arg.split("=") for arg in job.args))
    for word in words:
        path = os.path.normpath(os.path.join(job.place.start, word))
        if (
            ("/" in word or "." in word)
            and not path.startswith(("/", ".."))
            and path not in {".", *sent, *left_out}
            and os.path.lexists(source.folder / path)
        ):
            text = (
                f"the argument {printable(word)} exists in {source.folder}, but is not sent; if "
                f"the job reads it, {_option('--include', path)} sends it"
            )
            yield Notice("argument-not-sent", text)


def source_hash(items: Sequence[Item], hashes: Mapping[Path, str]) -> str:
    """Return a sha256 over a job's files: names, contents (``hashes``), link targets, and
    executable bits.
    """
    sha = hashlib.sha256()
    for item in sorted(items, key=lambda item: item.path):
        content = hashes[item.origin] if item.kind is ItemKind.FILE else item.target
        for part in (item.kind, item.path, content, "x" if _is_executable(item) else ""):
            raw = os.fsencode(part)
            sha.update(len(raw).to_bytes(8, "little"))
            sha.update(raw)
    return sha.hexdigest()


def manifest(items: Sequence[Item], hashes: Mapping[Path, str]) -> bytes:
    """Return the text of source.json, which lists a job's files. hashes: local path -> sha256."""
    files = []
    links = []
    folders = [item.path for item in items if item.kind is ItemKind.FOLDER]
    for item in items:
        if item.kind is ItemKind.FILE:
            facts = {
                "sha256": hashes[item.origin],
                "size": item.size,
                "executable": _is_executable(item),
            }
            files.append({"path": item.path, **facts})
        elif item.kind is ItemKind.LINK:
            links.append({"path": item.path, "target": item.target})
    lists = {"files": files, "links": links, "folders": folders}
    document = {"version": 1, "hash": source_hash(items, hashes), **lists}
    return (json.dumps(document, indent=1) + "\n").encode()


def _is_executable(item: Item) -> bool:
    return item.kind is ItemKind.FILE and bool(item.mode & stat.S_IXUSR)


@dataclass(slots=True)
class _Selection:
    """Selects the files of a project's folder to send, and collects them in ``items``.

    script: path of the job's script below ``folder``.
    has_tasks: whether the job is an array, which has folders with the names task-0, task-1, ...
    image: the job's container image, which is sent by itself.
    not_source: clusterctl's own folders, and those into which `collect --all` copied the cluster's
        files.
    """

    folder: Path
    script: str
    include: Sequence[str]
    exclude: Patterns
    has_tasks: bool
    image: Path | None = None
    not_source: frozenset[Path] = frozenset()
    items: list[Item] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)
    left_out: dict[str, Reason] = field(default_factory=dict)
    notes: list[Notice] = field(default_factory=list)
    bytes: int = 0
    files: int = 0

    def run(self) -> None:
        try:
            found = self._of_project() | self._included()
            script = self.folder / self.script
            # The script of an interactive session is a folder.
            if not script.is_dir():
                found[self.script] = script.stat()
            for path in sorted(found):
                self._add(self._item(path, found[path]))
            self._note_unmatched(found)
        except OSError as exc:
            raise unreadable_error([exc], fix=self._way_around(exc)) from exc
        if self.has_tasks:
            self._reject_names_of_tasks()
        if self.bytes > LARGE_BYTES or self.files > LARGE_FILES:
            size = (
                f"{formatting.size(self.bytes)} in {counted(self.files, 'file')}, most of it in "
                f"{self._largest()}"
            )
            text = f"the folder {self.folder} is large: {size}; {_LEAVE_OUT}"
            self.notes.append(Notice("folder-large", text))

    def _of_project(self) -> dict[str, os.stat_result]:
        """Return path -> status for the files that git shows, or for all files in a folder without
        git.
        """
        listing = FolderListing(self.folder, self._is_entered)
        found = dict(listing.paths(by_git=True))
        top = os.path.dirname(self.script)
        inside = f"{top}/" if top else ""
        # A script that git ignores together with its folder is sent with this folder.
        is_top = os.path.lexists(self.folder / top / ".git")
        if not is_top and not any(path.startswith(inside) for path in found):
            found |= listing.paths(top, by_git=False)
        if listing.warnings:
            text = f"git says: {printable('; '.join(listing.warnings))}"
            self.notes.append(Notice("git-warning", text))
        return {path: found[path] for path in found if self._is_source(path, found[path])}

    def _is_entered(self, path: str) -> bool:
        if self.script.startswith(f"{path}/"):
            return True
        if self.exclude.decide(path, is_folder=True):
            return False
        if self._holds_no_source(path):
            self.left_out[f"{path}/"] = Reason.NO_SOURCE
            return False
        return True

    def _is_source(self, path: str, status: os.stat_result) -> bool:
        is_folder = stat.S_ISDIR(status.st_mode)
        if self.exclude.decide(path, is_folder=is_folder):
            return False
        if is_folder:
            return True
        if _is_report(self.folder / path):
            self.left_out[path] = Reason.NO_SOURCE
            return False
        return not path.endswith(".pyc") and not self._is_image(path)

    def _included(self) -> dict[str, os.stat_result]:
        """Return path -> status for the files that --include selects.

        A pattern does not reach into a folder that holds no source, nor does it select a report:
        only its own path selects it, or the path of a file or folder in it.
        """
        include = patterns("--include", self.include)
        if include.spec is None:
            return {}
        found = dict[str, os.stat_result]()
        named = list(filter(None, map(_literal_path, self.include)))
        # Other patterns match names in any folder.
        are_paths = all(_literal_path(line) and "/" in line.rstrip("/") for line in self.include)
        for top in named if are_paths else ("", *named):
            for path, status in self._below(top):
                is_folder = stat.S_ISDIR(status.st_mode)
                if (
                    include.decide(path, is_folder=is_folder)
                    and not self.exclude.decide(path, is_folder=is_folder)
                    and (path == top or is_folder or not _is_report(self.folder / path))
                ):
                    found[path] = status
        return found

    def _note_unmatched(self, found: Mapping[str, os.stat_result]) -> None:
        """Note the patterns of --include that match no sent file."""
        entries = [(path, stat.S_ISDIR(status.st_mode)) for path, status in found.items()]
        for line in self.include:
            pattern = patterns("--include", [line])
            if not line.startswith("!") and not any(
                pattern.decide(path, is_folder=is_folder) for path, is_folder in entries
            ):
                text = (
                    f"--include {printable(line)} selects nothing in {self.folder}; a file of a "
                    "collected run, a cache or a virtual environment, and a report of "
                    "clusterctl, is only sent by its path, without wildcards"
                )
                self.notes.append(Notice("include-selects-nothing", text))

    def _below(self, top: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield all files at and below a path, also ignored files. Folders that hold no source are
        left out unless the path lies in them.
        """
        parents = [top, *map(str, Path(top).parents[:-1])]
        is_inside = bool(top) and any(map(self._holds_no_source, parents))

        def is_entered(path: str) -> bool:
            is_excluded = self.exclude.decide(path, is_folder=True)
            return not is_excluded and (is_inside or not self._holds_no_source(path))

        listing = FolderListing(self.folder, is_entered)
        if top:
            try:
                status = os.lstat(self.folder / top)
            except (FileNotFoundError, NotADirectoryError):
                return
            if ".." in Path(top).parts or not listing.enters(os.path.dirname(top)):
                return
            yield top, status
            if not listing.enters(top):
                return
        yield from listing.paths(top, by_git=False)

    def _holds_no_source(self, path: str) -> bool:
        """Return whether a folder contains installed, cached or collected files, or files for agents,
        rather than source files.
        """
        folder = self.folder / path
        if folder.name in _LEFT_OUT or (folder / "pyvenv.cfg").is_file():
            return True
        # The working folder of a run that is being collected.
        if folder.name.startswith(".") and folder.name.endswith(".incomplete"):
            return True
        return is_run(folder) or folder.resolve() in self.not_source

    def _is_image(self, path: str) -> bool:
        image = self.image
        return (
            image is not None
            and os.path.basename(path) == image.name
            and (self.folder / path).resolve() == image.resolve()
        )

    def _way_around(self, exc: OSError) -> str:
        """Return the fix for a file or folder that can't be read."""
        path = Path(os.fsdecode(exc.filename or ""))
        if path == self.folder or not path.is_relative_to(self.folder):
            return "make it readable"
        return (
            "make it readable, or leave it out: "
            f"{_option('--exclude', path.relative_to(self.folder))}"
        )

    def _item(self, path: str, status: os.stat_result) -> Item | None:
        try:
            item = Item.of(path, self.folder / path, status)
            return self._link(item) if item is not None and item.kind is ItemKind.LINK else item
        except FileNotFoundError:
            # Another program removed it just now.
            return None

    def _link(self, item: Item) -> Item | None:
        """Return the item to send for a link: the link, or the file outside to which it leads."""
        root = self.folder.resolve()
        try:
            end = item.origin.resolve(strict=True)
        except (OSError, RuntimeError):
            # pathlib raises RuntimeError for a cycle of links.
            return item
        if end.is_relative_to(root):
            text = os.path.normpath(Path(item.path).parent / item.target)
            if not Path(item.target).is_absolute() and not text.startswith(".."):
                return item
            target = os.path.relpath(end, item.origin.parent.resolve())
            return Item(
                item.path, ItemKind.LINK, item.origin, item.mode, item.mtime_ns, target=target
            )
        status = end.stat()
        if stat.S_ISDIR(status.st_mode):
            above = Path(os.path.commonpath((root, end)))
            shown = printable(shlex.quote(str(above)))
            send_all = (
                f"submit with --folder {shown}; or " if above.is_relative_to(Path.cwd()) else ""
            )
            raise UsageError(
                f"a link leads to a folder outside of {self.folder}",
                code="files-unfit",
                about="link",
                why=printable(f"{item.path} -> {item.target}"),
                fix=f"{send_all}exclude the link ({_option('--exclude', item.path)}) and copy "
                "the data with `clusterctl put PATH`",
            )
        return Item.of(item.path, item.origin, status)

    def add_folder(self, path: str) -> None:
        """Add the folder ``path`` below the project, and those above it, unless they are added
        already.
        """
        for parent in map(str, reversed((Path(path), *Path(path).parents[:-1]))):
            if parent not in (".", *self.folders):
                self.folders.add(parent)
                origin = self.folder / parent
                if made := Item.of(parent, origin, origin.lstat()):
                    self.items.append(made)

    def _add(self, item: Item | None) -> None:
        if item is None or item.path in self.folders:
            return
        self.add_folder(os.path.dirname(item.path))
        if item.kind is ItemKind.FOLDER:
            self.folders.add(item.path)
        elif item.kind is ItemKind.FILE:
            reject_read(item.origin)
        self.items.append(item)
        self.files += item.kind is ItemKind.FILE
        self.bytes += item.size
        if self.files > MAX_FILES or self.bytes > MAX_BYTES:
            limit = f"{MAX_FILES:,} files" if self.files > MAX_FILES else formatting.size(MAX_BYTES)
            raise UsageError(
                f"the folder of the job is too large to be sent: more than {limit}",
                code="files-unfit",
                about="size",
                where=str(self.folder),
                why=f"the largest entries so far are {self._largest()}",
                fix=f"{_LEAVE_OUT}; --folder selects a smaller folder, and --folder none sends "
                "only the script",
            )

    def _reject_names_of_tasks(self) -> None:
        names = [item.path for item in self.items if TASK.fullmatch(os.fsencode(item.path))]
        if names:
            raise UsageError(
                f"these names are reserved for the folders of the array's tasks: {', '.join(names)}",
                code="files-unfit",
                about="reserved",
                where=str(self.folder),
                fix=f"add {' '.join(f'--exclude /{name}' for name in names[:3])}, or rename the "
                "files",
            )

    def _largest(self) -> str:
        sizes: Counter[str] = Counter()
        for item in self.items:
            sizes[item.path.partition("/")[0]] += item.size
        return ", ".join(
            f"{printable(name)} ({formatting.size(size)})" for name, size in sizes.most_common(3)
        )


def _option(flag: str, path: str | Path) -> str:
    """Return an option for a shell that selects exactly this path below the sent folder."""
    return printable(f"{flag} {shlex.quote(literal_pattern(str(path)))}")


def _is_report(file: Path) -> bool:
    return file.suffix == ".html" and is_own_report(file)


@dataclass(frozen=True, slots=True)
class Patterns:
    """Patterns as in .gitignore, for paths below the sent folder. ``spec``: None without patterns."""

    spec: GitIgnoreSpec | None

    def decide(self, path: str, *, is_folder: bool) -> bool | None:
        """Return True if a pattern matches the path, False if a later ``!`` pattern does, otherwise
        None.
        """
        if self.spec is None:
            return None
        return self.spec.check_file(f"{path}/" if is_folder else path).include


_WILDCARD: Final = re.compile(r"\\(.)|[*?\[]")


def _literal_path(pattern: str) -> str:
    """Return the path that a pattern without wildcards names; "" if it has wildcards or excludes
    (``!``).
    """
    has_wildcard = any(match[1] is None for match in _WILDCARD.finditer(pattern))
    is_path = not has_wildcard and not pattern.startswith("!")
    return _WILDCARD.sub(r"\1", pattern).strip("/") if is_path else ""


def patterns(flag: str, lines: Sequence[str]) -> Patterns:
    """Compile the patterns ``lines`` of the option ``flag``. Raises UsageError if a pattern is
    malformed.
    """
    for line in lines:
        try:
            gitignore_spec([line])
        except (ValueError, re.error) as exc:
            raise UsageError(
                f"{flag}: {line} is not a valid pattern",
                about="pattern",
                fix="write the pattern as in a .gitignore file",
            ) from exc
    return Patterns(gitignore_spec(lines) if lines else None)
