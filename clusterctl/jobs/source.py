"""The folder of a user's script: what of it travels with the job."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import Notice, UsageError, printable
from clusterctl.scheduler.script import TAKEN_NAMES
from clusterctl.spec.job import JobSpec
from clusterctl.state.submissions import RUN_FILE
from clusterctl.state.workspace import cache_home, state_home
from clusterctl.transport.remote_open import read_json
from clusterctl.transport.tree import Item, Kind, not_readable, shown_size

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_BYTES, MAX_FILES = 10 << 30, 100_000
LARGE_BYTES, LARGE_FILES = 100 << 20, 5_000
_NEVER = ".git"  # not even looked into
_LEFT_OUT = frozenset({"__pycache__", "node_modules", ".ipynb_checkpoints"})
_NUMBERED = re.compile(r"(stdout|stderr)-[0-9]+\.log|task-[0-9]+")
_LEAVE_OUT = "leave things out with --exclude or a .gitignore, or bring data with `clusterctl put` once"
_MOST_RECORD = 16 << 20  # bytes of run.json
_TOKEN = re.compile(r"[0-9a-f]{8}")
GITIGNORE = ".gitignore"
# `x/**` is what lies below x, not x itself, which pathspec would leave out with it.
_BELOW = re.compile(r"/\*\*(\s*)$")


@dataclass(frozen=True, slots=True)
class Source:
    """What is sent of a script's folder. ``notes`` are worth saying to the user."""

    folder: Path
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.kind is Kind.FILE)

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.items)


def source_of(job: JobSpec) -> Source | None:
    """What travels with a job's script: its folder but for what is ignored; None with a bundled job.

    Raises:
        UsageError: something can't be read, leads out, has a name that is ours, or it is too much; or a
            pattern of --outputs can't be understood.
    """
    patterns("--outputs", job.outputs, Path())  # says which can't be understood
    if job.script is None:
        if job.include or job.exclude:
            raise UsageError(
                "--include and --exclude are about the folder of a script",
                code="bundled-job-without-folder",
                why=f"{job.bundled} is a bundled job, and no folder is sent with it",
            )
        return None
    folder = job.script.parent
    why_alone = _why_no_project(folder) if job.folder else "not wanted"
    if not why_alone:
        walk = FolderWalk(
            folder,
            job.script,
            patterns("--include", job.include, folder),
            patterns("--exclude", job.exclude, folder),
        )
        walk.run()
        return Source(folder, tuple(walk.items), walk.notes())
    if job.include:
        raise UsageError(
            f"--include is about the script's folder, and {folder} is {why_alone}",
            code="script-alone",
            fix="put the script and what it needs into a folder of their own",
        )
    try:
        item = Item.of(job.script.name, job.script, job.script.stat())
    except OSError as exc:
        raise not_readable([exc]) from exc
    note = Notice("script-sent-alone", f"only the script is sent: its folder, {folder}, is {why_alone}")
    return Source(folder, (item,) if item else (), (note,) if job.folder else ())


def source_hash(items: Sequence[Item], hashes: Mapping[Path, str]) -> str:
    """The sha256 of what a job was given: names, contents, targets of links, and what can be run."""
    sha = hashlib.sha256()
    for item in sorted(items, key=lambda item: item.path):
        said = hashes[item.origin] if item.kind is Kind.FILE else item.target
        for part in (item.kind, item.path, said, "x" if _is_executable(item) else ""):
            raw = os.fsencode(part)
            sha.update(len(raw).to_bytes(8, "little"))
            sha.update(raw)
    return sha.hexdigest()


def manifest(items: Sequence[Item], hashes: Mapping[Path, str]) -> bytes:
    """The content of source.json: what the job was given. Names that are not UTF-8 have lone surrogates."""
    files, links = [], []
    folders = [item.path for item in items if item.kind is Kind.FOLDER]
    for item in items:
        if item.kind is Kind.FILE:
            facts = {"sha256": hashes[item.origin], "size": item.size, "executable": _is_executable(item)}
            files.append({"path": item.path, **facts})
        elif item.kind is Kind.LINK:
            links.append({"path": item.path, "target": item.target})
    found = {"files": files, "links": links, "folders": folders}
    document = {"version": 1, "hash": source_hash(items, hashes), **found}
    return (json.dumps(document, indent=1) + "\n").encode()


def is_taken(path: str) -> bool:
    """Whether clusterctl itself writes a file of this path into a job's folder."""
    return path in TAKEN_NAMES or _NUMBERED.fullmatch(path) is not None


def _is_executable(item: Item) -> bool:
    return item.kind is Kind.FILE and bool(item.mode & stat.S_IXUSR)


def _why_no_project(folder: Path) -> str:
    """Why a folder is not one program's, or ""."""
    if folder == folder.parent:
        return "the root of the file system"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # it never raises
    if folder.resolve() == home.resolve():
        return "your home folder"
    if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH | stat.S_ISVTX:
        return "everybody's folder"
    return ""


@dataclass(slots=True)
class FolderWalk:
    """One walk through a folder, for what of it is sent.

    Raises:
        UsageError: something in it can't be sent.
    """

    folder: Path
    script: Path
    include: Ignore
    exclude: Ignore
    items: list[Item] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)
    ours: list[str] = field(default_factory=list)
    bytes: int = 0
    files: int = 0

    def run(self) -> None:
        try:
            left = [(self.folder, rules_above(self.folder), False)]
            while left:
                folder, rules, out = left.pop()
                own = read_gitignore(folder / GITIGNORE, folder)
                rules = (*rules, own) if own else rules
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
                below = [found for entry in entries if (found := self._entry(entry, rules, out=out))]
                left += reversed(below)
        except OSError as exc:
            raise not_readable([exc], fix="make it readable, or leave it out: --exclude NAME") from exc
        if self.ours:
            raise UsageError(
                f"clusterctl writes into a job's folder what is in the script's: {', '.join(self.ours)}",
                code="reserved-file-names",
                where=str(self.folder),
                fix="; ".join(f"--exclude /{name}" for name in self.ours[:3]) + ", or give it another name",
            )

    def _entry(
        self, entry: os.DirEntry[str], rules: tuple[Ignore, ...], *, out: bool
    ) -> tuple[Path, tuple[Ignore, ...], bool] | None:
        """Take one thing of a folder, or leave it out; a folder that is to be walked is returned."""
        path = Path(entry.path)
        is_folder = entry.is_dir(follow_symlinks=False)
        goes = self._goes(path, rules, is_folder=is_folder, out=out)
        if goes and (item := self._item(path, entry)) is not None:
            self._add(item)
        # What is left out may hold something that --include wants.
        wanted = is_folder and entry.name != _NEVER and (goes or self.include.spec is not None)
        excluded = wanted and self.exclude.says(path, is_folder=True) is True
        return (path, rules, not goes) if wanted and not excluded else None

    def _goes(self, path: Path, rules: tuple[Ignore, ...], *, is_folder: bool, out: bool) -> bool:
        if path == self.script:
            return True
        if path.name == _NEVER or self.exclude.says(path, is_folder=is_folder):
            return False
        if self.include.says(path, is_folder=is_folder):
            return True
        if out or is_ignored(rules, path, is_folder=is_folder):
            return False
        return not (_is_no_source(path) if is_folder else path.suffix == ".pyc")

    def _item(self, path: Path, entry: os.DirEntry[str]) -> Item | None:
        name = str(path.relative_to(self.folder))
        if path == self.script:
            return Item.of(name, path, path.stat())
        item = Item.of(name, path, entry.stat(follow_symlinks=False))
        return self._link(item) if item is not None and item.kind is Kind.LINK else item

    def _link(self, item: Item) -> Item | None:
        """A link that stays in the folder, or leads nowhere; of one to a file outside, the file."""
        root = self.folder.resolve()
        try:
            end = item.origin.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: pathlib's word for a ring of links
            return item
        if end.is_relative_to(root):
            text = os.path.normpath(Path(item.path).parent / item.target)
            if not Path(item.target).is_absolute() and not text.startswith(".."):
                return item
            target = os.path.relpath(end, item.origin.parent.resolve())
            return Item(item.path, Kind.LINK, item.origin, item.mode, item.mtime_ns, target=target)
        status = end.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(
                f"a link leads to a folder outside of {self.folder}",
                code="links-lead-outside",
                why=printable(f"{item.path} -> {item.target}"),
                fix="leave it out (--exclude NAME) and bring the data with `clusterctl put`",
            )
        return Item.of(item.path, item.origin, status)

    def _add(self, item: Item) -> None:
        if is_taken(item.path):
            self.ours.append(item.path)
        for parent in map(str, reversed(item.origin.relative_to(self.folder).parents[:-1])):
            if parent not in self.folders:  # left out itself, but something in it was wanted
                self.folders.add(parent)
                origin = self.folder / parent
                self.items += [made] if (made := Item.of(parent, origin, origin.lstat())) else []
        if item.kind is Kind.FOLDER:
            self.folders.add(item.path)
        self.items.append(item)
        self.files += item.kind is Kind.FILE
        self.bytes += item.size
        if self.files > MAX_FILES or self.bytes > MAX_BYTES:
            much = f"{MAX_FILES:,} files" if self.files > MAX_FILES else shown_size(MAX_BYTES)
            raise UsageError(
                f"the script's folder is too large to be sent with a job: more than {much}",
                code="folder-too-large",
                where=str(self.folder),
                why=f"of what was seen so far, the most is in {self._largest()}",
                fix=f"{_LEAVE_OUT}; --no-folder sends the script alone",
            )

    def notes(self) -> tuple[str, ...]:
        """A note if the folder is large."""
        if self.bytes <= LARGE_BYTES and self.files <= LARGE_FILES:
            return ()
        size = f"{shown_size(self.bytes)} in {self.files:,} files, the most in {self._largest()}"
        return (Notice("folder-large", f"the script's folder is large: {size}; {_LEAVE_OUT}"),)

    def _largest(self) -> str:
        """The three entries of the folder that hold the most bytes."""
        sizes: Counter[str] = Counter()
        for item in self.items:
            sizes[item.path.partition("/")[0]] += item.size
        return ", ".join(f"{printable(name)} ({shown_size(size)})" for name, size in sizes.most_common(3))


def _is_no_source(folder: Path) -> bool:
    """Whether a folder holds what was installed, cached or brought home, not what someone wrote."""
    if folder.name in _LEFT_OUT or (folder / "pyvenv.cfg").is_file():
        return True
    if folder.name.startswith(".") and folder.name.endswith(".incomplete"):  # a run that is being collected
        return True
    return token_of_run(folder) is not None or folder.resolve() in {
        state_home().resolve(),
        cache_home().resolve(),
    }


def token_of_run(folder: Path) -> str | None:
    """The token of the job whose collected run a folder is; None if it is no run's."""
    try:
        token = read_json(os.fsencode(folder), RUN_FILE.encode(), _MOST_RECORD)["token"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else None


@dataclass(frozen=True, slots=True)
class Ignore:
    """The rules of one .gitignore-like list. ``folder`` is where it lies, below which it counts."""

    folder: Path
    spec: GitIgnoreSpec | None  # None: no line counts

    def says(self, path: Path, *, is_folder: bool) -> bool | None:
        """Whether a path is ignored; None where no line is about it."""
        if self.spec is None:
            return None
        name = f"{path.relative_to(self.folder)}{'/' if is_folder else ''}"
        return self.spec.check_file(name).include


def patterns(flag: str, lines: Sequence[str], folder: Path) -> Ignore:
    """The patterns of a flag, which count from ``folder``.

    Raises:
        UsageError: one can't be understood.
    """
    for line in lines:
        if _spec([line]) is None:
            raise UsageError(
                f"{flag}: {line} is not a pattern",
                code="not-a-pattern",
                fix="write it as in a .gitignore file",
            )
    return Ignore(folder, _spec(lines))


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
    return Ignore(folder, spec)


def rules_above(folder: Path) -> tuple[Ignore, ...]:
    """What the repository around ``folder`` says of it, the outermost first; () if it ignores it whole."""
    root = next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    if root is None:
        return ()
    git = root / ".git"
    if git.is_file():  # it names the folder of a submodule, or of a worktree, below that of its repository
        lead = git.read_text(encoding="utf-8", errors="surrogateescape").removeprefix("gitdir:").strip()
        git = root / lead
        git = git.parents[1] if git.parent.name == "worktrees" else git
    exclude = read_gitignore(git / "info" / "exclude", root)
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


def _spec(lines: Sequence[str]) -> GitIgnoreSpec | None:
    """None where there are no lines, or one can't be understood."""
    if not lines:
        return None
    from pathspec import GitIgnoreSpec  # noqa: PLC0415 - slow, and most folders have no such file

    with warnings.catch_warnings():  # of brackets in what pathspec makes of patterns such as a[[:alpha:]]
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return GitIgnoreSpec.from_lines(_BELOW.sub(r"/**/*\1", line) for line in lines)
        except (ValueError, re.error):
            return None
