"""The files of a user's project that are sent with a job."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.errors import Notice, UsageError, printable
from clusterctl.jobs.project import project_obstacle
from clusterctl.jobs.secret_files import left_out_notice, without_secrets
from clusterctl.scheduler.request import Request
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import first_few
from clusterctl.spec.program import repository_of
from clusterctl.state.ledger import TASK, copied_folders, is_own_report, is_run
from clusterctl.state.workspace import cache_home, state_home
from clusterctl.transport.tree import (
    Item,
    Kind,
    format_size,
    gitignore_spec,
    literal_pattern,
    unreadable_error,
)
from clusterctl.util.numbers import counted

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_BYTES = 10 << 30
MAX_FILES = 100_000
LARGE_BYTES = 100 << 20
LARGE_FILES = 5_000
# This folder is neither sent nor searched.
_NEVER = ".git"
_LEFT_OUT = frozenset({"__pycache__", "node_modules", ".ipynb_checkpoints"})
_LEAVE_OUT = "exclude files with --exclude or a .gitignore, or copy data once with `clusterctl put`"
GITIGNORE = ".gitignore"


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a project to send with a job.

    notes: messages for the user. script: the path of the job's script in the folder; "" if it has
        none.
    """

    folder: Path
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    script: str = ""

    @property
    def files(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.kind is Kind.FILE)

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.items)

    def listed_again(self) -> Source:
        """Return the same files with their present sizes and times, without those that are gone."""
        items = []
        for item in self.items:
            now = item
            if item.kind is Kind.FILE:
                try:
                    found = Item.of(item.path, item.origin, item.origin.stat())
                except OSError:
                    found = None
                if found is not None and found.kind is Kind.FILE:
                    now = replace(found, mode=item.mode)
                elif item.path != self.script:
                    continue
            items.append(now)
        return replace(self, items=tuple(items))


def source_of(job: JobSpec) -> Source | None:
    """Return the files to send with a job: its project without ignored files, or None if bundled.

    Raises:
        UsageError: a file can't be read, a link leads to a folder outside, a name is reserved for
            clusterctl, the folder is too large, or a pattern is malformed.
    """
    # This call only rejects malformed patterns.
    patterns("--outputs", job.outputs, Path())
    if job.script is None:
        if job.include or job.exclude:
            raise UsageError(
                "--include and --exclude apply to the folder of a script",
                code="bundled-job-without-folder",
                why=f"{job.bundled} is a bundled job, which is submitted without a folder",
                fix="leave out --include and --exclude",
            )
        return None
    folder = job.place.folder
    obstacle = project_obstacle(folder) if job.folder else "excluded by --no-folder"
    if not obstacle:
        walk = FolderWalk(
            folder,
            folder / job.place.script,
            Include.of(job.include, folder),
            patterns("--exclude", job.exclude, folder),
            has_tasks=bool(Request.read(job).indices),
            image=None if job.container is None else Path(job.container),
        )
        walk.run()
        walk.add_folder(job.place.start)
        source = Source(folder, tuple(walk.items), walk.notes(), job.place.script)
        return without_unnamed_secrets(source, job.include)
    if job.include:
        raise UsageError(
            f"--include can't select files, because the script's folder is not sent: {folder} is "
            f"{obstacle}",
            code="script-alone",
            fix="move the script and the files it needs into a separate folder"
            if job.folder
            else "leave out --no-folder or --include",
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
    return replace(source, items=items, notes=(*source.notes, note))


def source_hash(items: Sequence[Item], hashes: Mapping[Path, str]) -> str:
    """Return a sha256 over a job's files: names, contents (``hashes``), link targets, and
    executable bits.
    """
    sha = hashlib.sha256()
    for item in sorted(items, key=lambda item: item.path):
        content = hashes[item.origin] if item.kind is Kind.FILE else item.target
        for part in (item.kind, item.path, content, "x" if _is_executable(item) else ""):
            raw = os.fsencode(part)
            sha.update(len(raw).to_bytes(8, "little"))
            sha.update(raw)
    return sha.hexdigest()


def manifest(items: Sequence[Item], hashes: Mapping[Path, str]) -> bytes:
    """Return the text of source.json, which lists a job's files. hashes: local path -> sha256."""
    files = []
    links = []
    folders = [item.path for item in items if item.kind is Kind.FOLDER]
    for item in items:
        if item.kind is Kind.FILE:
            facts = {
                "sha256": hashes[item.origin],
                "size": item.size,
                "executable": _is_executable(item),
            }
            files.append({"path": item.path, **facts})
        elif item.kind is Kind.LINK:
            links.append({"path": item.path, "target": item.target})
    lists = {"files": files, "links": links, "folders": folders}
    document = {"version": 1, "hash": source_hash(items, hashes), **lists}
    return (json.dumps(document, indent=1) + "\n").encode()


def _is_executable(item: Item) -> bool:
    return item.kind is Kind.FILE and bool(item.mode & stat.S_IXUSR)


@dataclass(slots=True)
class FolderWalk:
    """Walks through a project's folder and collects the files to send in ``items``.

    has_tasks: whether the job is an array, which has folders with the names task-0, task-1, ...
    image: the job's container image, which is sent by itself.
    kept_back: paths of environments, caches, runs and reports that patterns of --include match.
    not_source: clusterctl's own folders, and those into which `collect --all` copied the cluster's
        files.
    """

    folder: Path
    script: Path
    include: Include
    exclude: Ignore
    has_tasks: bool
    image: Path | None = None
    items: list[Item] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)
    ours: list[str] = field(default_factory=list)
    kept_back: list[str] = field(default_factory=list)
    not_source: frozenset[Path] = frozenset()
    bytes: int = 0
    files: int = 0

    def run(self) -> None:
        own = (state_home(), cache_home(), *copied_folders())
        self.not_source = frozenset(path.resolve() for path in own)
        try:
            pending = [_Folder(self.folder, rules_above(self.folder))]
            while pending:
                pending += reversed(self._search(pending.pop()))
        except OSError as exc:
            raise unreadable_error([exc], fix=self._way_around(exc)) from exc
        if self.ours:
            raise UsageError(
                "these names are reserved for the folders of the array's tasks: "
                f"{', '.join(self.ours)}",
                code="reserved-file-names",
                where=str(self.folder),
                fix=f"add {' '.join(f'--exclude /{name}' for name in self.ours[:3])}, or rename "
                "the files",
            )

    def _search(self, folder: _Folder) -> list[_Folder]:
        """Add the entries of a folder that are sent. Return the subfolders to search."""
        try:
            entries = sorted(os.scandir(folder.path), key=lambda entry: entry.name)
        except FileNotFoundError:
            # Another program removed it just now.
            return []
        if own_rules := read_gitignore(folder.path / GITIGNORE, folder.path):
            folder = replace(folder, rules=(*folder.rules, own_rules))
        return [child for entry in entries if (child := self._entry(entry, folder))]

    def _way_around(self, exc: OSError) -> str:
        """Return the fix for a file or folder that can't be read."""
        path = Path(os.fsdecode(exc.filename or ""))
        if path.name == GITIGNORE:
            path = path.parent
        if path == self.folder or not path.is_relative_to(self.folder):
            return "make it readable"
        return (
            "make it readable, or leave it out: "
            f"{_option('--exclude', path.relative_to(self.folder))}"
        )

    def _entry(self, entry: os.DirEntry[str], parent: _Folder) -> _Folder | None:
        """Add an entry of the folder ``parent`` if it is sent. Return it if it is a folder to
        search.
        """
        path = Path(entry.path)
        rules = parent.rules
        is_folder = entry.is_dir(follow_symlinks=False)
        # Patterns that exclude the script's folder would also exclude the modules beside the
        # script.
        if (
            is_folder
            and self.script.is_relative_to(path)
            and is_ignored(rules, path, is_folder=True)
        ):
            rules = ()
        is_ours = self._holds_no_source(path) if is_folder else _is_report(path)
        guard = parent.guard or (path if is_ours else None)
        is_sent = self._is_sent(
            path,
            rules,
            guard,
            is_folder=is_folder,
            is_left_out=parent.is_left_out
            or is_ours
            or (path.suffix == ".pyc" and not is_folder)
            or self._is_image(path),
        )
        if is_sent:
            self._add(self._item(path, entry))
        elif path == guard and path.name not in _LEFT_OUT:
            is_matched = self.include.patterns.decide(path, is_folder=is_folder)
            if is_matched:
                self.kept_back.append(str(path.relative_to(self.folder)))
        # An excluded folder may contain files that --include selects.
        is_searched = (
            is_folder
            and entry.name != _NEVER
            and (is_sent or self.include.may_select_in(path, guard))
        )
        excluded = is_searched and self.exclude.decide(path, is_folder=True) is True
        leads_to_script = self.script.is_relative_to(path)
        if is_searched and (leads_to_script or not excluded):
            return _Folder(path, rules, not is_sent, guard)
        return None

    def _is_sent(
        self,
        path: Path,
        rules: tuple[Ignore, ...],
        guard: Path | None,
        *,
        is_folder: bool,
        is_left_out: bool,
    ) -> bool:
        if path == self.script or (is_folder and self.script.is_relative_to(path)):
            return True
        if path.name == _NEVER or self.exclude.decide(path, is_folder=is_folder):
            return False
        if self.include.selects(path, guard, is_folder=is_folder):
            return True
        return not is_left_out and not is_ignored(rules, path, is_folder=is_folder)

    def _is_image(self, path: Path) -> bool:
        image = self.image
        return image is not None and path.name == image.name and path.resolve() == image.resolve()

    def _holds_no_source(self, folder: Path) -> bool:
        """Return whether a folder contains installed, cached or collected files rather than source
        files.
        """
        if folder.name in _LEFT_OUT or (folder / "pyvenv.cfg").is_file():
            return True
        # The working folder of a run that is being collected.
        if folder.name.startswith(".") and folder.name.endswith(".incomplete"):
            return True
        return is_run(folder) or folder.resolve() in self.not_source

    def _item(self, path: Path, entry: os.DirEntry[str]) -> Item | None:
        name = str(path.relative_to(self.folder))
        if path == self.script:
            return Item.of(name, path, path.stat())
        try:
            item = Item.of(name, path, entry.stat(follow_symlinks=False))
        except FileNotFoundError:
            # Another program removed it just now.
            return None
        return self._link(item) if item is not None and item.kind is Kind.LINK else item

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
            return Item(item.path, Kind.LINK, item.origin, item.mode, item.mtime_ns, target=target)
        status = end.stat()
        if stat.S_ISDIR(status.st_mode):
            above = Path(os.path.commonpath((root, end)))
            shown = printable(shlex.quote(str(above)))
            send_all = (
                f"submit with --folder {shown}; or " if above.is_relative_to(Path.cwd()) else ""
            )
            raise UsageError(
                f"a link leads to a folder outside of {self.folder}",
                code="links-lead-outside",
                why=printable(f"{item.path} -> {item.target}"),
                fix=f"{send_all}exclude the link ({_option('--exclude', item.path)}) and copy "
                "the data with `clusterctl put`",
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
        if item is None:
            return
        if self.has_tasks and TASK.fullmatch(os.fsencode(item.path)):
            self.ours.append(item.path)
        # The parent folder may be excluded although a file in it is included.
        self.add_folder(str(Path(item.path).parent))
        if item.kind is Kind.FOLDER:
            self.folders.add(item.path)
        self.items.append(item)
        self.files += item.kind is Kind.FILE
        self.bytes += item.size
        if self.files > MAX_FILES or self.bytes > MAX_BYTES:
            limit = f"{MAX_FILES:,} files" if self.files > MAX_FILES else format_size(MAX_BYTES)
            raise UsageError(
                f"the folder of the job is too large to be sent: more than {limit}",
                code="folder-too-large",
                where=str(self.folder),
                why=f"the largest entries so far are {self._largest()}",
                fix=f"{_LEAVE_OUT}; --folder selects a smaller folder, and --no-folder sends "
                "only the script",
            )

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.bytes > LARGE_BYTES or self.files > LARGE_FILES:
            size = (
                f"{format_size(self.bytes)} in {counted(self.files, 'file')}, most of it in "
                f"{self._largest()}"
            )
            text = f"the folder {self.folder} is large: {size}; {_LEAVE_OUT}"
            notes.append(Notice("folder-large", text))
        if self.kept_back:
            text = (
                f"not sent, although --include matches: {printable(first_few(self.kept_back))}; "
                "a pattern does not select collected runs, reports, caches and virtual "
                "environments; to send one, use its path: "
                f"{_option('--include', self.kept_back[0])}"
            )
            notes.append(Notice("include-kept-back", text))
        return tuple(notes)

    def _largest(self) -> str:
        sizes: Counter[str] = Counter()
        for item in self.items:
            sizes[item.path.partition("/")[0]] += item.size
        return ", ".join(
            f"{printable(name)} ({format_size(size)})" for name, size in sizes.most_common(3)
        )


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder to search. rules: the .gitignore patterns that apply to its entries.

    is_left_out: whether the folder itself is not sent.
    guard: the topmost folder without source that contains it; see ``Include``.
    """

    path: Path
    rules: tuple[Ignore, ...]
    is_left_out: bool = False
    guard: Path | None = None


def _option(flag: str, path: str | Path) -> str:
    """Return an option for a shell that selects exactly this path below the sent folder."""
    return printable(f"{flag} {shlex.quote(literal_pattern(str(path)))}")


def _is_report(file: Path) -> bool:
    return file.suffix == ".html" and is_own_report(file)


@dataclass(frozen=True, slots=True)
class Ignore:
    """Patterns as in .gitignore, for paths below ``folder``. ``spec``: None without patterns."""

    folder: Path
    spec: GitIgnoreSpec | None

    def decide(self, path: Path, *, is_folder: bool) -> bool | None:
        """Return True if a pattern matches the path, False if a later ``!`` pattern does, otherwise
        None.
        """
        if self.spec is None:
            return None
        name = f"{path.relative_to(self.folder)}{'/' if is_folder else ''}"
        return self.spec.check_file(name).include


@dataclass(frozen=True, slots=True)
class Include:
    """The patterns of --include. paths: those that patterns without wildcards name, from the top.

    A pattern does not reach into a folder that holds no source, the ``guard``, nor does it select a
    report: only its own path selects it, or the path of a file or folder in it.
    """

    patterns: Ignore
    paths: frozenset[Path]

    @classmethod
    def of(cls, lines: Sequence[str], folder: Path) -> Include:
        paths = frozenset(folder / path for line in lines if (path := _literal_path(line)))
        return cls(patterns("--include", lines, folder), paths)

    def selects(self, path: Path, guard: Path | None, *, is_folder: bool) -> bool:
        decision = self.patterns.decide(path, is_folder=is_folder)
        if guard is None or decision is False:
            return decision is True
        return any(
            named.is_relative_to(guard) and path.is_relative_to(named) for named in self.paths
        )

    def may_select_in(self, folder: Path, guard: Path | None) -> bool:
        """Return whether a pattern may select a file or folder in this folder."""
        if guard is None:
            return self.patterns.spec is not None
        return any(named.is_relative_to(folder) for named in self.paths)


_WILDCARD: Final = re.compile(r"\\(.)|[*?\[]")


def _literal_path(pattern: str) -> str:
    """Return the path that a pattern without wildcards names; "" if it has wildcards or excludes
    (``!``).
    """
    has_wildcard = any(match[1] is None for match in _WILDCARD.finditer(pattern))
    is_path = not has_wildcard and not pattern.startswith("!")
    return _WILDCARD.sub(r"\1", pattern).strip("/") if is_path else ""


def patterns(flag: str, lines: Sequence[str], folder: Path) -> Ignore:
    """Compile the patterns ``lines`` of the option ``flag``. Raises UsageError if a pattern is
    malformed.
    """
    for line in lines:
        if _spec([line]) is None:
            raise UsageError(
                f"{flag}: {line} is not a valid pattern",
                code="not-a-pattern",
                fix="write the pattern as in a .gitignore file",
            )
    return Ignore(folder, _spec(lines))


def read_gitignore(file: Path, folder: Path) -> Ignore | None:
    """Return the patterns of a .gitignore for paths below ``folder``; None without the file.

    A malformed line is ignored, as in git. Raises OSError if the file can't be read.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    spec = _spec(lines)
    if spec is None:
        spec = _spec([line for line in lines if _spec([line]) is not None])
    return Ignore(folder, spec)


def rules_above(folder: Path) -> tuple[Ignore, ...]:
    """Return the git repository's ignore patterns from above ``folder``, outermost first.

    Returns () if these patterns ignore ``folder`` itself, so that the files in it are sent anyway.
    """
    if (root := repository_of(folder)) is None:
        return ()
    git = root / ".git"
    # In a submodule or worktree, .git is a file with the path of the git folder.
    if git.is_file():
        lead = (
            git.read_text(encoding="utf-8", errors="surrogateescape")
            .removeprefix("gitdir:")
            .strip()
        )
        git = root / lead
        git = git.parents[1] if git.parent.name == "worktrees" else git
    exclude = read_gitignore(git / "info" / "exclude", root)
    inherited = [] if exclude is None else [exclude]
    ancestors = [path for path in folder.parents if path.is_relative_to(root)]
    inherited += [
        rules for path in reversed(ancestors) if (rules := read_gitignore(path / GITIGNORE, path))
    ]
    checked = (*reversed(ancestors), folder)[1:]
    ignored = any(is_ignored(inherited, path, is_folder=True) for path in checked)
    return () if ignored else tuple(inherited)


def is_ignored(rules: Sequence[Ignore], path: Path, *, is_folder: bool) -> bool:
    """Return whether a path is ignored, by the last of ``rules`` with a matching pattern."""
    for rule in reversed(rules):
        if path.is_relative_to(rule.folder) and path != rule.folder:
            verdict = rule.decide(path, is_folder=is_folder)
            if verdict is not None:
                return verdict
    return False


def _spec(lines: Sequence[str]) -> GitIgnoreSpec | None:
    """Compile patterns of a .gitignore. Return None without lines, or if a line is malformed."""
    try:
        return gitignore_spec(lines) if lines else None
    except (ValueError, re.error):
        return None
