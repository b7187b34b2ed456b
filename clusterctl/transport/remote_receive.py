"""Program that receives files on the cluster: standard library only, Python 3.9.

Arguments: STORE INTO [WAIT_S]. stdin and stdout are a transfer as in remote_content.py, with two
more KINDs in the list:

    ours: PAYLOAD is the content of a file.
    archive: a folder that the store keeps as archives/PATH. If the store lacks this folder, it
        arrives as eight bytes with a length and that many bytes of compressed JSON, path -> bytes
        as Latin-1.

Partial files stay for the next transfer.

With STORE "" the files are written directly below INTO, a folder that is created if missing; the
list then has no hashes. With a STORE each file is known by its sha256, and INTO must not exist: it
appears complete once the store has all its files. With INTO "" only the store is filled. Relative
paths start at the home folder. WAIT_S is the longest wait for the lock on the store (exit status
68).

The answer is a line of JSON, {"folder": PATH, "wrong": [INDEX, ...], "at": [PATH, ...]}. ``wrong``:
files that arrived incomplete or without the listed hash; they are discarded. ``at``: path of each
file in the store, if only the store was filled.
"""

from __future__ import annotations

import base64
import contextlib
import copy
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
from functools import partial
from io import BufferedReader
from typing import cast

from clusterctl.transport.remote_content import ALIVE_LINE, CHUNK, READ
from clusterctl.transport.remote_incoming import (
    Incoming,
    IncomingEntry,
    TruncatedError,
    UnexpectedError,
    find_existing,
    finish,
    finish_places,
    hash_in_place,
    is_unchanged,
    make_places,
    receive,
    reject_small_disk,
    write_all,
)
from clusterctl.transport.remote_open import KeepAlive, fail, lock, open_own, remove, remove_unless

STDIN = cast("BufferedReader", sys.stdin.buffer)
READ_ONLY = 0o400  # in the store
# Modification time of the files in the store, in whole seconds because some file systems keep no
# fractions.
SEALED = 1_000_000_000
# Bytes up to which a file is hashed again when it is copied from the store.
CHECKED = 1 << 20
# Longest wait for the lock. Only a sweep holds it exclusively.
LOCK_WAIT_S = 60.0
UNUSED_S = 30 * 86400
# For archives. A job may wait or run for long after the last submission that sent the same archive.
ARCHIVE_UNUSED_S = 365 * 86400
ARCHIVES = b"archives"
SWEEP_EVERY_S = 86400
INCOMPLETE = b".incomplete"


def alive() -> KeepAlive:
    """Return a writer of keep-alives to stdout, for use while files on this host are hashed."""
    return KeepAlive(sys.stdout.buffer, ALIVE_LINE + b"\n")


def read_entries() -> list[IncomingEntry]:
    entries: list[IncomingEntry] = []
    while (line := STDIN.readline()) != b"\n":
        if not line:
            raise TruncatedError
        entries.append(IncomingEntry(line[:-1], len(entries)))
    return entries


def is_stored(entry: IncomingEntry, beat: KeepAlive) -> bool:
    """Return whether the file store has the entry's content. If so, set the access time, to record
    the use.

    Stored files have the mtime ``SEALED``. A file with another mtime may have been changed, so it
    is hashed.
    """
    try:
        if entry.kind == "archive":
            remove_unless(stat.S_IFDIR, entry.final)
            os.utime(entry.final)
            return True
        status = os.lstat(entry.final)
        is_sealed = status.st_mtime == SEALED and stat.S_IMODE(status.st_mode) == READ_ONLY
        is_file = stat.S_ISREG(status.st_mode) and status.st_size == entry.size
        if not (is_sealed and is_file) and hash_in_place(entry, beat) != entry.payload:
            return False
        finish(entry.final, entry)
        return True
    except OSError:
        return False


def receive_archive(entry: IncomingEntry, incoming: Incoming) -> None:
    """Receive an archive under a temporary name. Rename it, unless another transfer has stored
    it.
    """
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
        # Sync the file system instead of each file, because the files are many and small.
        os.spawnlp(os.P_WAIT, "sync", "sync", "-f", making)  # noqa: S606
        os.rename(making, entry.final)
    except OSError:
        if not os.path.isdir(entry.final):
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def receive_all(entries: list[IncomingEntry], folder: bytes, *, stored: bool) -> list[int]:
    """Receive these files and archives below ``folder``. Return the indices of incomplete or wrong
    files.
    """
    beat = alive()
    find_existing(entries, beat)
    try:
        reject_small_disk(folder, entries)
    except OSError as exc:
        fail(folder, exc)
    sys.stdout.buffer.writelines(entry.request_line for entry in entries)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    incoming = Incoming(iter(partial(STDIN.read1, READ), b""), beat)
    wrong = []
    for entry in entries:
        try:
            if entry.kind == "archive":
                receive_archive(entry, incoming)
            elif receive(entry, incoming, stored=stored, hashed=stored) is None:
                wrong.append(entry.index)
        except OSError as exc:
            fail(entry.path, exc)
    return wrong


def receive_below(into: bytes, entries: list[IncomingEntry]) -> list[int]:
    try:
        make_places(into, entries, follow=True)
    except OSError as exc:
        fail(exc.filename or into, exc)
    beat = alive()
    files = [entry for entry in entries if entry.kind == "file" and not is_unchanged(entry, beat)]
    wrong = receive_all(files, os.path.abspath(into), stored=False)
    finish_places(entry for entry in entries if entry.kind == "folder")
    return wrong


def open_store(store: bytes, jobs: bytes, wait_s: float) -> int:
    """Lock the file store against ``sweep``, which removes unused files. Return the lock's
    descriptor.

    If a sweep is due, and no other process uses the store, sweep it first.
    """
    make_real_folder(os.path.join(store, b"partial"))
    path = os.path.join(store, b"lock")
    swept = os.path.join(store, b"swept")
    beat = alive()
    is_due = True
    with contextlib.suppress(FileNotFoundError):
        is_due = time.time() - os.lstat(swept).st_mtime > SWEEP_EVERY_S
    if is_due:
        lock_fd = open_own(path)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep(store, jobs, beat)
            os.close(open_own(swept))
            os.utime(swept)
        os.close(lock_fd)
    return lock(path, fcntl.LOCK_SH, wait_s, beat)


def make_real_folder(path: bytes) -> None:
    remove_unless(stat.S_IFDIR, path)
    os.makedirs(path, mode=0o700, exist_ok=True)


def sweep(store: bytes, jobs: bytes, beat: KeepAlive) -> None:
    """Remove unfinished job folders, and files unused for ``UNUSED_S`` (archives:
    ``ARCHIVE_UNUSED_S``).
    """
    now = time.time()
    for folder in os.scandir(store):
        oldest = now - (ARCHIVE_UNUSED_S if folder.name == ARCHIVES else UNUSED_S)
        if folder.is_dir(follow_symlinks=False):
            for file in os.scandir(folder):
                status = file.stat(follow_symlinks=False)
                # ``is_stored`` sets the access time at each use.
                if max(status.st_atime, status.st_mtime) < oldest:
                    remove(file.path)
                beat()
    for folder in os.scandir(jobs) if os.path.isdir(jobs) else ():
        if folder.name.startswith(b".") and folder.name.endswith(INCOMPLETE):
            remove(folder.path)
            beat()


def place_in_store(store: bytes, entries: list[IncomingEntry]) -> list[IncomingEntry]:
    """Set ``final`` and ``partial`` of files and archives. Return copies with mode and time of the
    store.
    """
    stored = []
    for entry in entries:
        if entry.kind not in {"file", "archive"}:
            continue
        is_file = entry.kind == "file"
        name = entry.payload.encode() if is_file else entry.path
        entry.final = os.path.join(store, name[:2] if is_file else ARCHIVES, name)
        entry.partial = os.path.join(store, b"partial", name)
        stored.append(copy.copy(entry))
        stored[-1].mode = READ_ONLY
        stored[-1].mtime_ns = SEALED * 1_000_000_000
    for folder in {os.path.dirname(entry.final) for entry in stored}:
        make_real_folder(folder)
    return stored


def receive_into_store(
    store: bytes, into: bytes, entries: list[IncomingEntry], wait_s: float
) -> tuple[list[int], list[str]]:
    lock_fd = open_store(store, os.path.dirname(into), wait_s)
    beat = alive()
    stored = place_in_store(store, entries)
    # Files of equal content are sent once.
    by_place = {entry.final: entry for entry in reversed(stored)}
    lacking = [entry for entry in by_place.values() if not is_stored(entry, beat)]
    wrong = receive_all(
        sorted(lacking, key=lambda entry: entry.index), os.path.abspath(store), stored=True
    )
    if into and not wrong:
        make_new_folder(into, entries)
    os.close(lock_fd)
    return wrong, [] if into else [os.path.abspath(entry.final).decode() for entry in stored]


def make_new_folder(into: bytes, entries: list[IncomingEntry]) -> None:
    """Create the new folder under a temporary name, and rename it once it is complete."""
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


def copy_stored(entry: IncomingEntry, fd: int) -> bool:
    """Copy a stored file to ``fd``. Return False if its size or, if the file is small, its hash is
    wrong.
    """
    with open(entry.final, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != entry.size:
            return False
        if entry.size <= CHECKED:
            data = file.read(entry.size)
            write_all(fd, data)
            return hashlib.sha256(data).hexdigest() == entry.payload
        beat = alive()
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


def assemble(folder: bytes, entries: list[IncomingEntry]) -> None:
    """Fill the new folder with copies of stored files, not links, because jobs may write to their
    files.
    """
    folder_entries = [entry for entry in entries if entry.kind != "archive"]
    damaged = [
        entry for entry in folder_entries if not make_entry(os.path.join(folder, entry.path), entry)
    ]
    for entry in folder_entries:
        if entry.kind == "folder":
            # The job writes its files there.
            os.chmod(os.path.join(folder, entry.path), entry.mode | stat.S_IRWXU)
    for entry in damaged:
        # The file may be gone already if two entries have the same content.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry.final)
    if damaged:
        count = "a file was" if len(damaged) == 1 else f"{len(damaged)} files were"
        sys.exit(f"{count} damaged in the file store; the next upload sends the content again")


def make_entry(path: bytes, entry: IncomingEntry) -> bool:
    """Create a file, folder or link at ``path``. Return False if the file in the file store is
    damaged.
    """
    if entry.kind == "folder":
        os.mkdir(path, 0o700)
        return True
    if entry.kind == "link":
        os.symlink(base64.b64decode(entry.payload), path)
        return True
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if entry.kind == "ours":
            write_all(fd, base64.b64decode(entry.payload))
        elif not copy_stored(entry, fd):
            return False
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(fd)
    return True


def main(store: str, into: str, wait_s: float = LOCK_WAIT_S) -> None:
    target = os.fsencode(into)
    store_paths: list[str] = []
    try:
        if store:
            os.umask(0o077)
        os.chdir(os.path.expanduser("~"))
        entries = read_entries()
        if store:
            wrong, store_paths = receive_into_store(os.fsencode(store), target, entries, wait_s)
        else:
            wrong = receive_below(target, entries)
    except (TruncatedError, UnexpectedError):
        sys.exit("the connection ended before all files had arrived")
    folder = base64.b64encode(os.path.realpath(target)).decode("ascii")
    sys.stdout.write(json.dumps({"folder": folder, "wrong": wrong, "at": store_paths}) + "\n")
