"""Receives files. Runs on the cluster: standard library only, Python 3.9.

Arguments: STORE INTO [WAIT_S]. stdin and stdout are a transfer as remote_content.py has it, with two more
KINDs in the list: ours, whose PAYLOAD is the content of a file; and archive, a folder that the store has as
archives/PATH, or gets there as one piece: eight bytes with the number of bytes that follow, and these, which
are compressed JSON, path -> bytes as Latin-1. What has arrived of a file stays for the next time.

With STORE "" files go straight to their places below INTO, a folder, which is made if need be, and the list
has no hashes. With a STORE each file is known by its sha256, and INTO must not be there yet: it appears
whole, when the store has all that it needs; with INTO "" only the store is filled. Relative paths begin at
the home folder. WAIT_S is how long a lock on the store is waited for (exit status 68).

The answer at the end is a line of JSON, {"folder": PATH, "wrong": [INDEX, ...], "at": [PATH, ...]}: ``wrong``
did not come whole, or not with the hash that was announced, and nothing was put in its place; ``at`` is where
the store has each file, if only that was filled.
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
    Entry,
    Incoming,
    TruncatedError,
    UnexpectedError,
    find_begun,
    finish,
    finish_places,
    hash_in_place,
    make_places,
    receive,
    reject_small_disk,
    write_all,
)
from clusterctl.transport.remote_open import Beat, fail, lock, open_own, remove, remove_unless

STDIN = cast("BufferedReader", sys.stdin.buffer)
READ_ONLY = 0o400  # the mode of a file of the store
SEALED = 1_000_000_000  # its time of change; whole seconds, which is all that some file systems keep
CHECKED = 1 << 20  # bytes up to which a file is checked again when it is copied from the store
LOCK_WAIT_S = 60.0  # for a sweep, the only one of ours that keeps others out
UNUSED_S = 30 * 86400
# Of archives. A job may wait or run for long after the last submission that brought the same archive.
ARCHIVE_UNUSED_S = 365 * 86400
ARCHIVES = b"archives"
SWEEP_EVERY_S = 86400
INCOMPLETE = b".incomplete"


def alive() -> Beat:
    """A sign of life while files are read here: this can take a while."""
    return Beat(sys.stdout.buffer, ALIVE_LINE + b"\n")


def read_entries() -> list[Entry]:
    entries: list[Entry] = []
    while (line := STDIN.readline()) != b"\n":
        if not line:
            raise TruncatedError
        entries.append(Entry(line[:-1], len(entries)))
    return entries


def is_stored(entry: Entry, beat: Beat) -> bool:
    """Whether the store has the content, which is hashed again only if it was changed.

    Whatever writes to a file of the store gives it another time of change. Its time of access says when it
    was last used.
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


def receive_all(entries: list[Entry], folder: bytes, *, stored: bool) -> list[int]:
    """Ask for these files and archives, and receive them; returns those that did not come whole."""
    beat = alive()
    find_begun(entries, beat)
    try:
        reject_small_disk(folder, entries)
    except OSError as exc:
        fail(folder, exc)
    sys.stdout.buffer.writelines(entry.wanted for entry in entries)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    incoming = Incoming(iter(partial(STDIN.read1, READ), b""), beat)
    wrong = []
    for entry in entries:
        try:
            if entry.kind == "archive":
                take_archive(entry, incoming)
            elif receive(entry, incoming, stored=stored, hashed=stored) is None:
                wrong.append(entry.index)
        except OSError as exc:
            fail(entry.path, exc)
    return wrong


def receive_below(into: bytes, entries: list[Entry]) -> list[int]:
    try:
        make_places(into, entries, follow=True)
    except OSError as exc:
        fail(exc.filename or into, exc)
    wrong = receive_all([one for one in entries if one.kind == "file"], os.path.abspath(into), stored=False)
    finish_places(entry for entry in entries if entry.kind == "folder")
    return wrong


def open_store(store: bytes, jobs: bytes, wait_s: float) -> int:
    """Hold the store against a sweep; first sweep it, if that is due and nobody else uses it."""
    make_real_folder(os.path.join(store, b"partial"))
    path, swept = os.path.join(store, b"lock"), os.path.join(store, b"swept")
    beat = alive()
    is_due = True
    with contextlib.suppress(FileNotFoundError):
        is_due = time.time() - os.lstat(swept).st_mtime > SWEEP_EVERY_S
    if is_due:
        held = open_own(path)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep(store, jobs, beat)
            os.close(open_own(swept))
            os.utime(swept)
        os.close(held)
    return lock(path, fcntl.LOCK_SH, wait_s, beat)


def make_real_folder(path: bytes) -> None:
    remove_unless(stat.S_IFDIR, path)
    os.makedirs(path, mode=0o700, exist_ok=True)


def sweep(store: bytes, jobs: bytes, beat: Beat) -> None:
    """Remove what no submission has used for long, and folders that were never made whole."""
    now = time.time()
    for folder in os.scandir(store):
        oldest = now - (ARCHIVE_UNUSED_S if folder.name == ARCHIVES else UNUSED_S)
        if folder.is_dir(follow_symlinks=False):
            for file in os.scandir(folder):
                status = file.stat(follow_symlinks=False)
                if max(status.st_atime, status.st_mtime) < oldest:  # of what is whole, see ``is_stored``
                    remove(file.path)
                beat()
    for folder in os.scandir(jobs) if os.path.isdir(jobs) else ():
        if folder.name.startswith(b".") and folder.name.endswith(INCOMPLETE):
            remove(folder.path)
            beat()


def in_store(store: bytes, entries: list[Entry]) -> list[Entry]:
    """Find the place of each file and archive in the store. Return them as they are, or will be, there."""
    stored = []
    for entry in entries:
        if entry.kind not in {"file", "archive"}:
            continue
        is_file = entry.kind == "file"
        name = entry.payload.encode() if is_file else entry.path
        entry.final = os.path.join(store, name[:2] if is_file else ARCHIVES, name)
        entry.partial = os.path.join(store, b"partial", name)
        stored.append(copy.copy(entry))
        stored[-1].mode, stored[-1].mtime_ns = READ_ONLY, SEALED * 1_000_000_000
    for folder in {os.path.dirname(entry.final) for entry in stored}:
        make_real_folder(folder)
    return stored


def receive_into_store(
    store: bytes, into: bytes, entries: list[Entry], wait_s: float
) -> tuple[list[int], list[str]]:
    held, beat = open_store(store, os.path.dirname(into), wait_s), alive()
    stored = in_store(store, entries)
    # Of several files with one content, one has to come.
    first = {entry.final: entry for entry in reversed(stored)}
    lacking = [entry for entry in first.values() if not is_stored(entry, beat)]
    wrong = receive_all(sorted(lacking, key=lambda entry: entry.index), os.path.abspath(store), stored=True)
    if into and not wrong:
        make_new(into, entries)
    os.close(held)
    return wrong, [] if into else [os.path.abspath(entry.final).decode() for entry in stored]


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
    sys.stdout.write(json.dumps({"folder": folder, "wrong": wrong, "at": at}) + "\n")
