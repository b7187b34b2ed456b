"""Receives files. Runs on the cluster: standard library only, Python 3.9.

Arguments: STORE INTO [WAIT_S]. stdin: a list as remote_content.py has it, with two more KINDs: ours, whose
PAYLOAD is the content of a file; and archive, a folder that the store has as archives/PATH, or gets there as
one piece: eight bytes with the number of bytes that follow, and these, which are compressed JSON, path ->
bytes as Latin-1. The answers are {"send": [[INDEX, HAVE], ...]}, the last of them empty: the files that are
missing, and how many bytes of each are here already; {"checked": 1} comes before them now and then, as a sign
of life. stdin then brings the rest of each in turn (``send_content``). What has arrived of a file stays for
the next time.

With STORE "" files go straight to their places below INTO, a folder, which is made if need be, and none has a
hash. First the answers {"alike": [[INDEX, SHA256], ...]}, the last of them empty, tell which files are here
in the same size, and stdin brings a JSON array of the indexes of those that differ. After each file comes a
last piece, as of ``send_wanted``. With a STORE each file is known by its sha256, and INTO must not be there
yet: it appears whole, when the store has all that it needs; with INTO "" only the store is filled. Relative
paths begin at the home folder. WAIT_S is how long a lock on the store is waited for (exit status 68).

The last answer is {"folder": PATH, "wrong": [INDEX, ...], "at": [PATH, ...]}: ``wrong`` did not come whole,
or not with the hash that was announced, and nothing was put in its place; ``at`` is where the store has each
file, if only that was filled.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import time
import zlib
from io import BufferedReader
from typing import cast

from clusterctl.transport.remote_content import (
    CHUNK,
    READ,
    Beat,
    Entry,
    Incoming,
    TruncatedError,
    UnexpectedError,
    finish,
    finish_places,
    hash_of,
    make_place,
    name_it,
    open_partial,
    open_unnamed,
    place_below,
    write_all,
)
from clusterctl.transport.remote_open import OWNERS, fail, lock, open_own, remove, remove_unless

STDIN = cast("BufferedReader", sys.stdin.buffer)
SYNCED = 1 << 20  # bytes from which a file of the store is on disk before it has its name
SYNC_EVERY = 1 << 28
READ_ONLY = 0o400  # the mode of a file of the store
SEALED = 1_000_000_000  # its time of change; whole seconds, which is all that some file systems keep
MAX_OPEN = 256  # partial files that are held open
SPARE = 16 << 20
CHECKED = 1 << 20  # bytes up to which a file is checked again when it is copied from the store
ROWS = 4096  # in a line of an answer
LOCK_WAIT_S = 60.0  # for a sweep, the only one of ours that keeps others out
UNUSED_S = 30 * 86400
# Of archives. A job may wait or run for long after the last submission that brought the same archive.
ARCHIVE_UNUSED_S = 365 * 86400
ARCHIVES = b"archives"
SWEEP_EVERY_S = 86400
INCOMPLETE = b".incomplete"


def emit(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def emit_rows(name: str, rows: list[list[object]]) -> None:
    """Several lines, since each has a limit; an empty one is the last."""
    for at in range(0, len(rows), ROWS):
        emit(**{name: rows[at : at + ROWS]})
    emit(**{name: []})


def checking() -> Beat:
    """A sign of life while files are read here: this can take a while."""
    return Beat(lambda: emit(checked=1))


def read_entries() -> list[Entry]:
    entries: list[Entry] = []
    while (line := STDIN.readline()) != b"\n":
        if not line:
            raise TruncatedError
        entries.append(Entry(line[:-1]))
    return entries


def hash_in_place(entry: Entry, beat: Beat) -> str:
    """The hash of what lies in a file's place; "" where that is no file of its size."""
    try:
        status = os.lstat(entry.final)
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return ""
        fd = os.open(entry.final, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return str(hash_of(fd, entry.size, beat).hexdigest())
        finally:
            os.close(fd)
    except OSError:
        return ""


def is_stored(entry: Entry, beat: Beat) -> bool:
    """Whether the store has the content, which is hashed again only if it was changed."""
    try:
        if entry.kind == "archive":
            remove_unless(stat.S_ISDIR, entry.final)
            os.utime(entry.final)
            return True
        status = os.lstat(entry.final)
        is_sealed = status.st_mtime == SEALED and stat.S_IMODE(status.st_mode) == READ_ONLY
        if is_sealed and stat.S_ISREG(status.st_mode) and status.st_size == entry.size:
            os.utime(entry.final, (time.time(), SEALED))
            return True
        if hash_in_place(entry, beat) != entry.payload:
            return False
        seal(entry.final)
        return True
    except OSError:
        return False


def seal(place: bytes | int) -> None:
    """Mark a file of the store as whole, and as used now.

    Whatever writes to it gives it another time of change. Its time of access says when it was last used.
    """
    os.chmod(place, READ_ONLY)
    os.utime(place, (time.time(), SEALED))


def find_missing(entries: list[Entry], *, stored: bool) -> dict[int, tuple[int | None, int]]:
    """Files to be sent, by index: the open partial file of one that had begun, and how much of it is here."""
    missing: dict[int, tuple[int | None, int]] = {}
    begun: set[bytes] = set()
    for index in not_stored(entries) if stored else different(entries):
        entry, missing[index] = entries[index], (None, 0)
        if entry.is_new or entry.partial in begun or len(begun) == MAX_OPEN:
            continue
        if os.path.lexists(entry.partial):
            fd = open_partial(entry.partial)
            if fd is not None:
                begun.add(entry.partial)
                missing[index] = fd, min(os.fstat(fd).st_size, entry.size)
    return missing


def not_stored(entries: list[Entry]) -> list[int]:
    """The files and archives that the store lacks: of several with one content, the first."""
    beat = checking()
    first: dict[bytes, int] = {}
    for index, entry in enumerate(entries):
        if entry.final and entry.final not in first and not is_stored(entry, beat):
            first[entry.final] = index
    return list(first.values())


def different(entries: list[Entry]) -> list[int]:
    """The files of which another content, or none, is in their place: the other side tells by the hashes."""
    beat = checking()
    files = [index for index, entry in enumerate(entries) if entry.kind == "file"]
    there = [index for index in files if not entries[index].is_new]
    alike = {index: sha for index in there if (sha := hash_in_place(entries[index], beat))}
    emit_rows("alike", [[index, sha] for index, sha in alike.items()])
    if not (line := STDIN.readline()):
        raise TruncatedError
    same = alike.keys() - set(json.loads(line))
    finish_places(entries[index] for index in same)
    return [index for index in files if index not in same]


def take(entry: Entry, fd: int | None, have: int, incoming: Incoming, *, stored: bool) -> bool:
    """Receive a file and give it its place; False if it did not come whole, or has another hash."""
    partial = entry.partial
    if fd is None and (fd := open_unnamed(entry)) is not None:
        return take_unnamed(entry, fd, incoming)
    if fd is None:
        fd = open_partial(partial)
    if fd is None:  # another transfer sends the same content right now
        partial = entry.partial + b".%d" % os.getpid()
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNERS)
    try:
        arrived = Syncing(fd) if stored else lambda _: None
        sha = incoming.rest(fd, have, entry.size, arrived, hashed=stored)
        if not (sha.hexdigest() == entry.payload if stored else incoming.arrives_whole(sha)):
            os.unlink(partial)
            return False
        if stored:
            if entry.size > SYNCED:
                os.fsync(fd)
            remove_unless(stat.S_ISREG, entry.final)
        os.replace(partial, entry.final)
        if stored:
            seal(fd)
        else:  # before, another transfer of the same content must be able to open it
            finish(fd, entry)
    except BaseException:
        if partial != entry.partial:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        raise
    finally:
        os.close(fd)
    return True


def take_unnamed(entry: Entry, fd: int, incoming: Incoming) -> bool:
    """The same of a file that has no name yet, and no hash."""
    try:
        is_whole = incoming.arrives_whole(incoming.rest(fd, 0, entry.size, hashed=False))
        if is_whole:
            name_it(fd, entry)
        return is_whole
    finally:
        os.close(fd)


def take_archive(entry: Entry, incoming: Incoming) -> None:
    """Receive a folder, which appears whole; another transfer may be quicker."""
    files = json.loads(zlib.decompress(incoming.exactly(incoming.number())))
    making = entry.partial + b".%d" % os.getpid()
    shutil.rmtree(making, ignore_errors=True)
    try:
        for name, text in files.items():
            path = os.path.join(making, os.fsencode(name))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(text.encode("latin-1"))
                os.fchmod(file.fileno(), READ_ONLY)
        # As a whole, since the files are many and small.
        os.spawnlp(os.P_WAIT, "sync", "sync", "-f", making)  # noqa: S606
        os.rename(making, entry.final)
    except OSError:
        if not os.path.isdir(entry.final):
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


class Syncing:
    """Writes what has arrived for the store to the disk now and then.

    A long sync at the end would look like a hang.
    """

    def __init__(self, fd: int) -> None:
        self.fd, self.unsynced = fd, 0

    def __call__(self, count: int) -> None:
        self.unsynced += count
        if self.unsynced >= SYNC_EVERY:
            os.fdatasync(self.fd)
            self.unsynced = 0


def refuse_small_disk(folder: bytes, missing_bytes: int) -> None:
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    free, needed = status.f_bavail * status.f_frsize, missing_bytes + SPARE
    if needed > free:
        fail(folder, OSError(errno.ENOSPC, f"{needed >> 20} MiB are needed and {free >> 20} MiB are free"))


def receive_all(entries: list[Entry], folder: bytes, *, stored: bool) -> list[int]:
    """Say what is missing and take it; returns the files that came with another hash."""
    missing = find_missing(entries, stored=stored)
    refuse_small_disk(folder, sum(entries[index].size - have for index, (_, have) in missing.items()))
    emit_rows("send", [[index, have] for index, (_, have) in missing.items()])
    incoming = Incoming(lambda: STDIN.read1(READ), checking())
    wrong = []
    for index, (fd, have) in missing.items():
        try:
            if entries[index].kind == "archive":
                take_archive(entries[index], incoming)
            elif not take(entries[index], fd, have, incoming, stored=stored):
                wrong.append(index)
        except OSError as exc:
            fail(entries[index].path, exc)
    return wrong


def receive_below(into: bytes, entries: list[Entry]) -> list[int]:
    os.makedirs(into, exist_ok=True)
    new: set[bytes] = set()
    for entry in entries:
        begun = b"%d %d %s" % (entry.size, entry.mtime_ns, entry.path)
        place_below(into, entry, hashlib.sha256(begun).hexdigest())
        try:
            make_place(entry, new, follow=True)
        except OSError as exc:
            fail(entry.path, exc)
    wrong = receive_all(entries, os.path.abspath(into), stored=False)
    finish_places(entry for entry in entries if entry.kind == "folder")
    return wrong


def open_store(store: bytes, jobs: bytes, wait_s: float) -> int:
    """Hold the store against a sweep; first sweep it, if that is due and nobody else uses it."""
    make_real_folder(os.path.join(store, b"partial"))
    path, swept = os.path.join(store, b"lock"), os.path.join(store, b"swept")
    alive = Beat(lambda: emit(checked=0))
    is_due = True
    with contextlib.suppress(FileNotFoundError):
        is_due = time.time() - os.lstat(swept).st_mtime > SWEEP_EVERY_S
    if is_due:
        held = open_own(path)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep(store, jobs, alive)
            os.close(open_own(swept))
            os.utime(swept)
        os.close(held)
    return lock(path, fcntl.LOCK_SH, wait_s, alive)


def make_real_folder(path: bytes) -> None:
    remove_unless(stat.S_ISDIR, path)
    os.makedirs(path, mode=0o700, exist_ok=True)


def sweep(store: bytes, jobs: bytes, alive: Beat) -> None:
    """Remove what no submission has used for long, and folders that were never made whole."""
    now = time.time()
    for folder in os.scandir(store):
        oldest = now - (ARCHIVE_UNUSED_S if folder.name == ARCHIVES else UNUSED_S)
        if folder.is_dir(follow_symlinks=False):
            for file in os.scandir(folder):
                status = file.stat(follow_symlinks=False)
                if max(status.st_atime, status.st_mtime) < oldest:  # of what is whole, see ``seal``
                    remove(file.path)
                alive()
    for folder in os.scandir(jobs) if os.path.isdir(jobs) else ():
        if folder.name.startswith(b".") and folder.name.endswith(INCOMPLETE):
            remove(folder.path)
            alive()


def find_in_store(store: bytes, entries: list[Entry]) -> None:
    """Say where the store has, or will have, the content of each file and archive."""
    for entry in entries:
        if entry.kind in {"file", "archive"}:
            is_file = entry.kind == "file"
            name = entry.payload.encode() if is_file else entry.path
            entry.final = os.path.join(store, name[:2] if is_file else ARCHIVES, name)
            entry.partial = os.path.join(store, b"partial", name)
    for folder in {os.path.dirname(entry.final) for entry in entries if entry.final}:
        make_real_folder(folder)


def receive_into_store(
    store: bytes, into: bytes, entries: list[Entry], wait_s: float
) -> tuple[list[int], list[str]]:
    held = open_store(store, os.path.dirname(into), wait_s)
    find_in_store(store, entries)
    wrong = receive_all(entries, os.path.abspath(store), stored=True)
    if into and not wrong:
        make_new(into, entries)
    os.close(held)
    return wrong, [] if into else [os.path.abspath(entry.final).decode() for entry in entries]


def make_new(into: bytes, entries: list[Entry]) -> None:
    """The new folder appears with all that is in it."""
    parent, name = os.path.split(into)
    os.makedirs(parent, exist_ok=True)
    making = os.path.join(parent, b"." + name + INCOMPLETE)
    os.mkdir(making)
    try:
        assemble(making, entries)
        os.rename(making, into)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def copy_stored(entry: Entry, fd: int) -> bool:
    """Copy from the store, if what it has is the file. A small one is checked again.

    Of a large one the blocks are shared where the file system can.
    """
    with open(entry.final, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != entry.size:
            return False
        if entry.size <= CHECKED:
            data = file.read(entry.size)
            write_all(fd, data)
            return hashlib.sha256(data).hexdigest() == entry.payload
        beat = checking()
        try:
            while os.copy_file_range(file.fileno(), fd, 1 << 28):
                beat()
            return os.fstat(fd).st_size == entry.size
        except OSError as exc:
            if exc.errno not in {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            file.seek(0)
            os.lseek(fd, 0, os.SEEK_SET)
            while data := file.read(CHUNK):
                write_all(fd, data)
                beat()
            return True


def assemble(folder: bytes, entries: list[Entry]) -> None:
    """Make the new folder of what the store has; a job may write into its own copy."""
    own = [entry for entry in entries if entry.kind != "archive"]
    damaged = [entry for entry in own if not make_one(os.path.join(folder, entry.path), entry)]
    for entry in damaged:
        with contextlib.suppress(FileNotFoundError):  # two files may have one content
            os.unlink(entry.final)
    if damaged:
        sys.exit(f"{len(damaged)} files were damaged in the store; they are sent anew the next time")


def make_one(path: bytes, entry: Entry) -> bool:
    """Make a file, folder or link; False if the store has something else than its name says."""
    if entry.kind == "folder":
        os.mkdir(path, 0o700)
        return True
    if entry.kind == "link":
        os.symlink(base64.b64decode(entry.payload), path)
        return True
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 | (entry.mode & 0o100))
    try:
        if entry.kind == "ours":
            write_all(fd, base64.b64decode(entry.payload))
        elif not copy_stored(entry, fd):
            return False
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(fd)
    return True


def main(store: str, into: str, wait_s: float = LOCK_WAIT_S) -> None:
    place = os.fsencode(into)
    at: list[str] = []
    try:
        if store:
            os.umask(0o077)
        os.chdir(os.path.expanduser("~"))
        entries = read_entries()
        if store:
            wrong, at = receive_into_store(os.fsencode(store), place, entries, wait_s)
        else:
            wrong = receive_below(place, entries)
    except (TruncatedError, UnexpectedError):
        sys.exit("the connection ended too soon")
    folder = base64.b64encode(os.path.realpath(place)).decode("ascii")
    emit(folder=folder, wrong=wrong, at=at)
