"""The sha256 of files here. What was hashed once is not read again while it is unchanged."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from clusterctl.errors import MachineError
from clusterctl.state.workspace import cache_home
from clusterctl.transport.tree import Item, Progress, not_readable

REMEMBERED = 1 << 20  # bytes: smaller files are read as fast as they are looked up
_SETTLED_NS = 2_000_000_000  # a file this young may change again within the clock's resolution
_UNUSED_S = 90 * 86400
_AT_ONCE = min(8, os.cpu_count() or 1)
_CHUNK = 1 << 20
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS hashes (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, "
    "ctime_ns INTEGER, inode INTEGER, sha256 TEXT, used REAL) WITHOUT ROWID"
)


def hash_items(
    files: Sequence[Item],
    *,
    progress: Progress = lambda *_: None,
    now_ns: Callable[[], int] = time.time_ns,
) -> Mapping[Path, str]:
    """Origin -> sha256 in hex. ``progress`` hears from any thread.

    Raises:
        UsageError: some can't be read; all are named.
        MachineError: there is no folder to remember hashes in.
    """
    unreadable: list[OSError] = []
    done = 0
    total = sum(item.size for item in files)

    stopped = threading.Event()
    counting = threading.Lock()

    def more(count: int) -> None:
        nonlocal done
        if stopped.is_set():
            raise InterruptedError
        with counting:
            done += count
            now = done
        progress("hashing", now, total)

    def one(item: Item) -> str:
        try:
            return _hash(item.origin, known, more, now_ns)
        except OSError as exc:
            exc.filename = exc.filename or str(item.origin)
            unreadable.append(exc)
            return ""
        except BaseException:  # else it would be heard only after all files before this one
            stopped.set()
            raise

    large = [item.origin for item in files if item.size >= REMEMBERED]
    with _remembered(large) as known, ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            found = dict(zip((item.origin for item in files), pool.map(one, files), strict=True))
        except BaseException:  # the pool waits for its threads: Ctrl-C must reach them
            stopped.set()
            raise
    if unreadable:
        raise not_readable(unreadable)
    return found


_Key = tuple[int, int, int, int]
_Known = dict[bytes, tuple[_Key, str]]


def _hash(path: Path, known: _Known, progress: Callable[[int], None], now_ns: Callable[[], int]) -> str:
    """The hash of a file, from ``known`` if it is there and else put there."""
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        key = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        before = known.get(os.fsencode(path))
        if before is not None and before[0] == key:
            progress(status.st_size)
            return before[1]
        sha = hashlib.sha256()
        while data := file.read(_CHUNK):
            sha.update(data)
            progress(len(data))
    newest = max(status.st_mtime_ns, status.st_ctime_ns)
    if status.st_size >= REMEMBERED and now_ns() - newest > _SETTLED_NS:
        known[os.fsencode(path)] = (key, sha.hexdigest())
    return sha.hexdigest()


@contextmanager
def _remembered(paths: Sequence[Path]) -> Iterator[_Known]:
    """What is known of these files; what is in it at the end is known the next time."""
    if not paths:
        yield {}
        return
    file = cache_home() / "hashes.sqlite"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(file, timeout=30)) as database:
            database.execute(_SCHEMA)
            known = _read(database, paths)
            yield known
            _write(database, known)
    except (OSError, sqlite3.Error) as exc:
        raise MachineError(
            "the hashes of files can't be remembered",
            where=str(file),
            why=str(exc),
            fix="remove the file if it is damaged, make room, or set XDG_CACHE_HOME to another folder",
        ) from exc


def _read(database: sqlite3.Connection, paths: Sequence[Path]) -> _Known:
    known: _Known = {}
    for path in map(os.fsencode, paths):
        row = database.execute(
            "SELECT size, mtime_ns, ctime_ns, inode, sha256 FROM hashes WHERE path = ?", (path,)
        ).fetchone()
        if row:
            known[path] = ((row[0], row[1], row[2], row[3]), row[4])
    return known


def _write(database: sqlite3.Connection, known: _Known) -> None:
    now = time.time()
    with database:
        database.executemany(
            "INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(path, *key, sha, now) for path, (key, sha) in known.items()],
        )
        database.execute("DELETE FROM hashes WHERE used < ?", (now - _UNUSED_S,))
