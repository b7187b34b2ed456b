"""Local files and folders to upload: their list and their sha256."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from clusterctl.errors import MachineError, UsageError, printable
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.transport.base import Conversation
from clusterctl.util.confine import reject_opened
from clusterctl.util.process import parallel_map

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

# Called with (activity, bytes done, bytes in all), in any thread.
Progress = Callable[[str, int, int], None]
# Bytes from which hashes are cached. Smaller files are read as fast as they are looked up.
REMEMBERED = 1 << 20
# A file changed more recently may change again without a different time.
_SETTLED_NS = 2_000_000_000
_MOST_REMEMBERED = 20_000  # files
_MAX_THREADS = min(8, os.cpu_count() or 1)
_CHUNK = 1 << 20
# `x/**` matches the files below x. pathspec would match x itself as well.
_BELOW = re.compile(r"/\*\*(\s*)$")
# Path -> (size, mtime and ctime in ns, inode), sha256.
_HashCache = dict[str, tuple[tuple[int, ...], str]]


def with_title(title: str, progress: Progress) -> Progress:
    """Return a function that calls ``progress``, with a title before the name of the activity."""
    return lambda activity, done, total: progress(f"{title}: {activity}", done, total)


@dataclass(slots=True)
class ReceivedStream:
    """Iterator over the pieces of stdout that a conversation receives.

    progress: called after each piece with the number of bytes received and ``total``, unless
        ``total`` is 0.
    done: bytes of the complete files. came: bytes received of the current file.
    """

    talk: Conversation
    progress: Progress = lambda *_: None
    done: int = 0
    came: int = 0
    total: int = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        data = self.talk.receive()
        if not data:
            # If the command failed, this raises its error.
            self.talk.finish()
            raise StopIteration
        if self.total:
            self.came += len(data)
            self.progress("fetching", min(self.done + self.came, self.total), self.total)
        return data


class ItemKind(StrEnum):
    """Kinds of items that can be sent. Pipes, sockets and devices can't be sent.

    ARCHIVE: a folder sent as a single piece, unless the cluster's file store has a folder of that
        name.
    """

    FOLDER = "folder"
    FILE = "file"
    LINK = "link"
    ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class Item:
    """A file, folder, link or archive to send.

    path: path below the target folder. Bytes that are not UTF-8 are as `os.fsdecode` returns them.
    origin: local path. size: size of a file, in bytes. target: target of a link.
    """

    path: str
    kind: ItemKind
    origin: Path
    mode: int
    mtime_ns: int
    size: int = 0
    target: str = ""

    @classmethod
    def of(cls, path: str, origin: Path, status: os.stat_result) -> Item | None:
        """Return the item for a local file ``origin`` with this status; None for a pipe, socket or
        device.
        """
        mode = stat.S_IMODE(status.st_mode)
        mtime = status.st_mtime_ns
        if stat.S_ISDIR(status.st_mode):
            return cls(path, ItemKind.FOLDER, origin, mode, mtime)
        if stat.S_ISLNK(status.st_mode):
            # Path would change the target.
            target = os.readlink(origin)
            return cls(path, ItemKind.LINK, origin, mode, mtime, target=target)
        if stat.S_ISREG(status.st_mode):
            return cls(path, ItemKind.FILE, origin, mode, mtime, status.st_size)
        return None


_WILDCARDS: Final = frozenset("*?[")


def list_items(roots: Sequence[Path]) -> tuple[tuple[Item, ...], tuple[Path, ...]]:
    """Return the items at and below ``roots``, and the paths of skipped pipes, sockets and devices.

    The path of an item begins with the name of its root. Links are not followed, except in
    ``roots``.

    Raises:
        UsageError: files can't be read, or two roots have the same name.
    """
    items: list[Item] = []
    skipped: list[Path] = []
    unreadable: list[OSError] = []
    names: dict[str, Path] = {}
    for root in roots:
        name = root.resolve().name if root.name in {"", ".."} else root.name
        if not name or name in names:
            raise UsageError(
                f"two of the files and folders to send are called {printable(name)}"
                if name
                else (
                    f"the folder {printable(str(root))} can't be sent, because its path ends "
                    "without a name"
                ),
                about="name-twice",
                fix="rename one of them, or send them by separate commands to different folders"
                if name
                else "send the files and folders in it instead",
            )
        names[name] = root
    pending = list(reversed(names.items()))
    while pending:
        path, origin = pending.pop()
        try:
            item = Item.of(path, origin, origin.stat(follow_symlinks=path in names))
            if item is None:
                skipped.append(origin)
                continue
            items.append(item)
            if item.kind is ItemKind.FOLDER:
                child_names = sorted(entry.name for entry in os.scandir(origin))
                pending += [(f"{path}/{name}", origin / name) for name in reversed(child_names)]
        except OSError as exc:
            unreadable.append(exc)
    if unreadable:
        patterns = {*filter(is_pattern, map(str, roots))}
        fix = ""
        if all(isinstance(e, FileNotFoundError) and e.filename in patterns for e in unreadable):
            fix = "no file here matches the wildcards"
        raise unreadable_error(unreadable, fix=fix)
    return tuple(items), tuple(skipped)


def is_pattern(path: str) -> bool:
    """Return whether a path has wildcards, which a shell leaves there if no file matches them."""
    return not _WILDCARDS.isdisjoint(path)


def unreadable_error(errors: Sequence[OSError], *, fix: str = "") -> UsageError:
    """Return the error for local files that can't be read. ``fix``: advice instead of the default
    advice.
    """
    reasons = [
        f"{printable(os.fsdecode(exc.filename or ''))}: {exc.strerror or exc}" for exc in errors
    ]
    more = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""  # noqa: PLR2004
    problem = "the files to send can't be read"
    details = "; ".join(reasons[:3]) + more
    return UsageError(
        problem,
        code="file-unreadable",
        about="here",
        why=details,
        fix=fix or "make the files readable, or leave them out",
    )


def gitignore_spec(lines: Iterable[str]) -> GitIgnoreSpec:
    """Compile patterns of a .gitignore. Raises ValueError or re.error if a line is malformed."""
    from pathspec import GitIgnoreSpec

    # `re` warns about the brackets that pathspec makes of patterns such as a[[:alpha:]].
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return GitIgnoreSpec.from_lines(_BELOW.sub(r"/**/*\1", line) for line in lines)


_SPECIAL: Final = re.compile(r"[\\*?\[\]]|\s+\Z")


def literal_pattern(path: str) -> str:
    """Return the .gitignore pattern that matches only this path, from the top of the patterns'
    folder.
    """
    return "/" + _SPECIAL.sub(
        lambda match: "".join(f"\\{char}" for char in match[0]), path.rstrip("/")
    )


def hash_items(
    files: Sequence[Item], *, progress: Progress = lambda *_: None
) -> Mapping[Path, str]:
    """Return a mapping: local path of each file -> sha256 in hex of its first ``Item.size`` bytes.

    A file that has grown since it was listed counts as it was then. Hashes of large files are
    cached.

    Raises UsageError if files can't be read. The error lists up to three of these files.
    """
    with _hash_cache(used=any(item.size >= REMEMBERED for item in files)) as cache:
        hashing = _Hashing(cache, progress, sum(item.size for item in files))
        try:
            hashes = parallel_map(files, hashing.hash, most=_MAX_THREADS)
        finally:
            hashing.stopped.set()
    if hashing.unreadable:
        raise unreadable_error(hashing.unreadable)
    return dict(zip((item.origin for item in files), hashes, strict=True))


@dataclass(slots=True)
class _Hashing:
    """Hashing of files in several threads. total, done: bytes. stopped: set it to end all
    threads.
    """

    cache: _HashCache
    progress: Progress
    total: int
    done: int = 0
    unreadable: list[OSError] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def hash(self, item: Item) -> str:
        """Return the hash of a file. If the file can't be read, record the error and return ""."""
        try:
            return self._hash(item.origin, item.size)
        except OSError as exc:
            exc.filename = exc.filename or str(item.origin)
            self.unreadable.append(exc)
            return ""
        except BaseException:
            # The results of the other threads are no longer needed.
            self.stopped.set()
            raise

    def _hash(self, path: Path, size: int) -> str:
        with path.open("rb", buffering=0) as file:
            reject_opened(file.fileno(), path)
            status = os.fstat(file.fileno())
            key = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            previous_key, sha256 = self.cache.get(str(path), ((), ""))
            has_grown = status.st_size > size
            if previous_key == key and not has_grown:
                self._count(status.st_size)
                return sha256
            sha = hashlib.sha256()
            rest = size
            while data := file.read(min(_CHUNK, rest)):
                sha.update(data)
                rest -= len(data)
                self._count(len(data))
        newest = max(status.st_mtime_ns, status.st_ctime_ns)
        if not has_grown and status.st_size >= REMEMBERED and time.time_ns() - newest > _SETTLED_NS:
            self.cache[str(path)] = (key, sha.hexdigest())
        return sha.hexdigest()

    def _count(self, size: int) -> None:
        if self.stopped.is_set():
            raise InterruptedError
        with self._counting:
            self.done += size
            done = self.done
        self.progress("hashing", done, self.total)


@contextmanager
def _hash_cache(*, used: bool) -> Iterator[_HashCache]:
    """Yield the cache of hashes; an empty cache unless ``used``. Save it at the end if the disk
    permits.
    """
    if not used:
        yield {}
        return
    file = cache_home() / "hashes.json"
    cache = cast("_HashCache", {})
    with suppress(OSError, ValueError, TypeError, AttributeError):
        cache = {
            path: ((*key,), sha256) for path, (key, sha256) in json.loads(file.read_bytes()).items()
        }
    before = dict(cache)
    yield cache
    if cache != before:
        with suppress(OSError, MachineError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(dict([*cache.items()][-_MOST_REMEMBERED:])))
