"""Content by its hash, and new folders made of it. Runs on the cluster: standard library only, Python 3.9.

Arguments: STORE INTO [REQUIRED [WAIT_S]]. Request and content: see remote_receive.py. INTO is a folder that
must not be there yet: it appears whole, when the store has all that it needs; with INTO "" only the
store is filled. Relative paths begin at the home folder. REQUIRED is a folder without which nothing is done
(exit status 66), WAIT_S how long a lock on the store is waited for (exit status 68).

The last answer is {"folder": PATH, "wrong": [INDEX, ...], "at": [PATH, ...]}: ``wrong`` did not have the hash
that was announced, and nothing was made; ``at`` is where the store has each file, if only that was filled.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import time

from clusterctl.transport.remote_open import lock, open_own, remove, remove_unless
from clusterctl.transport.remote_receive import Entry, checking, read_entries, receive_all, tell, write_all
from clusterctl.transport.remote_send import CHUNK, Beat

SMALL = 1 << 20  # bytes up to which a file is checked again when it is copied from the store
NO_REQUIRED = 66
LOCK_WAIT_S = 60.0  # for a sweep, the only one of ours that keeps others out
UNUSED_S = 30 * 86400
SWEEP_EVERY_S = 86400
INCOMPLETE = b".incomplete"


def open_store(store: bytes, jobs: bytes, wait_s: float) -> int:
    """Hold the store against a sweep; first sweep it, if that is due and nobody else uses it."""
    make_folder(os.path.join(store, b"partial"))
    path, swept = os.path.join(store, b"lock"), os.path.join(store, b"swept")
    alive = Beat(lambda: tell(checked=0))
    if is_due(swept):
        held = open_own(path)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep(store, jobs, alive)
            os.close(open_own(swept))
            os.utime(swept)
        os.close(held)
    return lock(path, fcntl.LOCK_SH, wait_s, alive)


def make_folder(path: bytes) -> None:
    remove_unless(stat.S_ISDIR, path)
    os.makedirs(path, mode=0o700, exist_ok=True)


def is_due(swept: bytes) -> bool:
    try:
        return time.time() - os.lstat(swept).st_mtime > SWEEP_EVERY_S
    except FileNotFoundError:
        return True


def sweep(store: bytes, jobs: bytes, alive: Beat) -> None:
    """Remove what no submission has used for long, and folders that were never made whole."""
    oldest = time.time() - UNUSED_S
    for folder in os.scandir(store):
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
    """Say where the store has, or will have, the content of each file."""
    for entry in entries:
        if entry.kind == "file":
            name = entry.payload.encode()
            entry.final = os.path.join(store, name[:2], name)
            entry.partial = os.path.join(store, b"partial", name)
    for folder in {os.path.dirname(entry.final) for entry in entries if entry.final}:
        make_folder(folder)


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


def copy_small(entry: Entry, fd: int) -> bool:
    with open(entry.final, "rb", buffering=0) as file:
        data = file.read(entry.size + 1)
    if hashlib.sha256(data).hexdigest() != entry.payload:
        return False
    write_all(fd, data)
    return True


def copy_large(entry: Entry, fd: int) -> bool:
    """Share the blocks where the file system can."""
    with open(entry.final, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != entry.size:
            return False
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
    damaged = [entry for entry in entries if not make_one(os.path.join(folder, entry.path), entry)]
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
        elif not (copy_small if entry.size <= SMALL else copy_large)(entry, fd):
            return False
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(fd)
    return True


def main(store: str, into: str, required: str = "", wait_s: float = LOCK_WAIT_S) -> None:
    if required and not os.path.isdir(required):
        sys.exit(NO_REQUIRED)
    os.umask(0o077)
    os.chdir(os.path.expanduser("~"))
    wrong, at = receive_into_store(os.fsencode(store), os.fsencode(into), read_entries(), wait_s)
    folder = base64.b64encode(os.path.realpath(os.fsencode(into))).decode("ascii")
    tell(folder=folder, wrong=wrong, at=at)
