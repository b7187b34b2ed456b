"""Folders of this machine as lists of what is in them, and the sha256 of files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import cast

from clusterctl.errors import MachineError, UsageError, printable
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.transport.base import Conversation
from clusterctl.util.process import parallel_map

Progress = Callable[[str, int, int], None]  # (what is done, bytes done, bytes in all)
REMEMBERED = 1 << 20  # bytes: smaller files are read as fast as they are looked up
_SETTLED_NS = 2_000_000_000  # a file this young may change again within the clock's resolution
_MOST_REMEMBERED = 20_000  # files
_MAX_THREADS = min(8, os.cpu_count() or 1)
_CHUNK = 1 << 20
# Path -> size, times of change in ns, inode; and sha256.
_Known = dict[str, tuple[tuple[int, ...], str]]


def titled(title: str, progress: Progress) -> Progress:
    """The same progress, which says of what it is."""
    return lambda what, done, total: progress(f"{title}: {what}", done, total)


@dataclass(slots=True)
class Stream:
    """What a conversation says, piece by piece; ``progress`` is shown of files of ``total`` bytes.

    ``done``: how many bytes of these were here before the last ``came``.
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
            # If the command failed, that is the reason for the end.
            self.talk.finish()
            raise StopIteration
        if self.total:
            self.came += len(data)
            self.progress("fetching", min(self.done + self.came, self.total), self.total)
        return data


class Kind(StrEnum):
    """What travels. Pipes, sockets and devices do not.

    ARCHIVE: a folder as one piece, which is sent only if the cluster has no folder of that name.
    """

    FOLDER = "folder"
    FILE = "file"
    LINK = "link"
    ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to send. ``path`` is below the folder it goes to; ``origin`` is where it lies here.

    ``size`` is in bytes; ``target`` is a link's. Names that are not UTF-8 are as `os.fsdecode` has them.
    """

    path: str
    kind: Kind
    origin: Path
    mode: int
    mtime_ns: int
    size: int = 0
    target: str = ""

    @classmethod
    def of(cls, path: str, origin: Path, status: os.stat_result) -> Item | None:
        """The item with this status, or None if it is of no kind that travels."""
        mode, mtime = stat.S_IMODE(status.st_mode), status.st_mtime_ns
        if stat.S_ISDIR(status.st_mode):
            return cls(path, Kind.FOLDER, origin, mode, mtime)
        if stat.S_ISLNK(status.st_mode):
            return cls(path, Kind.LINK, origin, mode, mtime, target=os.readlink(origin))  # noqa: PTH115  # as it stands
        if stat.S_ISREG(status.st_mode):
            return cls(path, Kind.FILE, origin, mode, mtime, status.st_size)
        return None


def walk(roots: Sequence[Path]) -> tuple[tuple[Item, ...], tuple[Path, ...]]:
    """All that is in these files and folders, each under its own name; and what is of no kind that travels.

    Links stay links, but a root that is one stands for what it leads to.

    Raises:
        UsageError: some can't be read (all are named), or two have one name.
    """
    items: list[Item] = []
    others: list[Path] = []
    unreadable: list[OSError] = []
    names: dict[str, Path] = {}
    for root in roots:
        name = root.resolve().name if root.name in {"", ".."} else root.name
        if not name or name in names:
            raise UsageError(
                f"{printable(str(root))} has no name of its own"
                if not name
                else f"two of them are called {printable(name)}",
                code="name-twice",
                fix="send what is in it, or one after the other",
            )
        names[name] = root
    left = list(reversed(names.items()))
    while left:
        path, origin = left.pop()
        try:
            item = Item.of(path, origin, origin.stat(follow_symlinks=path in names))
            if item is None:
                others.append(origin)
                continue
            items.append(item)
            if item.kind is Kind.FOLDER:
                below = sorted(entry.name for entry in os.scandir(origin))
                left += [(f"{path}/{name}", origin / name) for name in reversed(below)]
        except OSError as exc:
            unreadable.append(exc)
    if unreadable:
        raise not_readable(unreadable)
    return tuple(items), tuple(others)


def not_readable(errors: Sequence[OSError], *, fix: str = "") -> UsageError:
    said = [f"{printable(os.fsdecode(exc.filename or ''))}: {exc.strerror or exc}" for exc in errors]
    more = f", and {len(said) - 3} more" if len(said) > 3 else ""  # noqa: PLR2004
    what = "can't read what is to be sent"
    why = "; ".join(said[:3]) + more
    return UsageError(what, code="files-unreadable", why=why, fix=fix or "make it readable, or leave it out")


def shown_size(size: float) -> str:
    """A number of bytes for people: ``3.2 MiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size:.0f} B"


def hash_items(files: Sequence[Item], *, progress: Progress = lambda *_: None) -> Mapping[Path, str]:
    """Origin -> sha256 in hex. A file that was hashed before is not read again while it is unchanged.

    ``progress`` is called in any thread.

    Raises:
        UsageError: some can't be read; all are named.
    """
    with _remembered(wanted=any(item.size >= REMEMBERED for item in files)) as known:
        hashing = _Hashing(known, progress, sum(item.size for item in files))
        try:
            hashes = parallel_map(files, hashing.hash, most=_MAX_THREADS)
        finally:
            hashing.stopped.set()
    if hashing.unreadable:
        raise not_readable(hashing.unreadable)
    return dict(zip((item.origin for item in files), hashes, strict=True))


@dataclass(slots=True)
class _Hashing:
    """Hashes files in several threads, until it is ``stopped``."""

    known: _Known
    progress: Progress
    total: int
    done: int = 0
    unreadable: list[OSError] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def hash(self, item: Item) -> str:
        """Return the hash of a file, "" if it can't be read."""
        try:
            return self._hash(item.origin)
        except OSError as exc:
            exc.filename = exc.filename or str(item.origin)
            self.unreadable.append(exc)
            return ""
        except BaseException:
            # The other threads need not read to the end.
            self.stopped.set()
            raise

    def _hash(self, path: Path) -> str:
        """Return the hash of a file, from ``known`` if it is there, else put it there."""
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            key = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            before, sha256 = self.known.get(str(path), ((), ""))
            if before == key:
                self._count(status.st_size)
                return sha256
            sha = hashlib.sha256()
            while data := file.read(_CHUNK):
                sha.update(data)
                self._count(len(data))
        newest = max(status.st_mtime_ns, status.st_ctime_ns)
        if status.st_size >= REMEMBERED and time.time_ns() - newest > _SETTLED_NS:
            self.known[str(path)] = (key, sha.hexdigest())
        return sha.hexdigest()

    def _count(self, size: int) -> None:
        if self.stopped.is_set():
            raise InterruptedError
        with self._counting:
            self.done += size
            done = self.done
        self.progress("hashing", done, self.total)


@contextmanager
def _remembered(*, wanted: bool) -> Iterator[_Known]:
    """The hashes of files that were hashed before, if they are ``wanted``; new ones are kept at the end.

    A damaged memory is an empty one, and what can't be written is hashed again the next time.
    """
    if not wanted:
        yield {}
        return
    file, known = cache_home() / "hashes.json", cast("_Known", {})
    with suppress(OSError, ValueError, TypeError, AttributeError):
        known = {path: ((*key,), sha256) for path, (key, sha256) in json.loads(file.read_bytes()).items()}
    before = dict(known)
    yield known
    if known != before:
        with suppress(OSError, MachineError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(dict([*known.items()][-_MOST_REMEMBERED:])))
