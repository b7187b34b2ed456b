"""Receives files, each known by its sha256. Runs on the cluster: standard library only, Python 3.9.

stdin: a JSON array a line, [KIND, PATH, MODE, MTIME_NS, SIZE, PAYLOAD], and an empty line. KIND is folder,
link, file or ours; PAYLOAD is a file's sha256, a link's target, or the content of a file of ours. Paths,
targets and content are base64, since they may be any bytes.

The answer is {"send": [[INDEX, HAVE], ...]}: the files that are missing, and how many bytes of each are here
already; {"checked": 1} comes before it now and then, as a sign of life. stdin then brings, for each in turn,
eight bytes with the number of bytes that follow, and these. What has arrived of a file stays for the next
time.

As a program it puts files straight to their places. Argument: INTO, a folder, made if need be; relative ones
begin at the home folder. The last answer is {"folder": PATH, "wrong": [INDEX, ...]}: ``wrong`` did not have
the hash that was announced, and was not put in its place.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time
from io import BufferedReader
from typing import Any, cast

from clusterctl.transport.remote_open import OWNERS, fail, lies_at, open_own, remove_unless
from clusterctl.transport.remote_send import CHUNK, HEADER, ZEROS, Beat, hash_of

STDIN = cast("BufferedReader", sys.stdin.buffer)
SYNCED = 1 << 20  # bytes from which a file of the store is on disk before it has its name
SYNC_EVERY = 1 << 28
READ_ONLY = 0o400  # the mode of a file of the store
SEALED = 1_000_000_000  # its time of change; whole seconds, which is all that some file systems keep
AT_ONCE = 256  # partial files that are held open
SPARE = 16 << 20


class Entry:
    """One line of the request; ``final`` is where its content goes, ``partial`` where that arrives."""

    __slots__ = ("final", "kind", "mode", "mtime_ns", "partial", "path", "payload", "size")

    def __init__(self, row: list[Any]) -> None:
        self.kind: str = row[0]
        self.path: bytes = base64.b64decode(row[1])
        self.mode, self.mtime_ns, self.size = int(row[2]), int(row[3]), int(row[4])
        self.payload: str = row[5]
        self.final = self.partial = b""


def tell(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def some(size: int) -> bytes:
    """At most so many bytes of stdin, as they come."""
    data = STDIN.read1(size)
    if not data:
        sys.exit("the connection ended too soon")
    return data


def checking() -> Beat:
    """A sign of life while files are read here: this can take a while."""
    return Beat(lambda: tell(checked=1))


def is_here(entry: Entry, *, stored: bool, beat: Beat) -> bool:
    """Whether the content is in its place. What lies in the store is hashed again only if it was changed."""
    try:
        status = os.lstat(entry.final)
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return False
        if stored and status.st_mtime == SEALED and stat.S_IMODE(status.st_mode) == READ_ONLY:
            os.utime(entry.final, (time.time(), SEALED))
            return True
        fd = os.open(entry.final, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            right = bool(hash_of(fd, entry.size, beat).hexdigest() == entry.payload)
        finally:
            os.close(fd)
        if right and stored:
            seal(entry.final)
        return right
    except OSError:
        return False


def seal(place: bytes | int) -> None:
    """Mark a file of the store as whole, and as used now.

    Whatever writes to it gives it another time of change. Its time of access says when it was last used.
    """
    os.chmod(place, READ_ONLY)
    os.utime(place, (time.time(), SEALED))


def open_partial(path: bytes) -> int | None:
    """What an interrupted transfer left, for us alone; None if another one writes it right now."""
    fd = open_own(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lies_at(path, fd):  # else the other one has just given it its place
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def find_missing(entries: list[Entry], *, stored: bool) -> tuple[list[int], dict[bytes, int], dict[int, int]]:
    """Files to be sent, by index; the open partials of those that had begun; and how much of each is here."""
    beat = checking()
    missing: list[int] = []
    begun: dict[bytes, int] = {}
    have: dict[int, int] = {}
    seen: set[bytes] = set()
    for index, entry in enumerate(entries):
        if (
            entry.kind != "file"
            or (stored and entry.final in seen)
            or is_here(entry, stored=stored, beat=beat)
        ):
            continue
        seen.add(entry.final)
        missing.append(index)
        if entry.partial not in begun and os.path.lexists(entry.partial) and len(begun) < AT_ONCE:
            fd = open_partial(entry.partial)
            if fd is not None:
                begun[entry.partial] = fd
                have[index] = min(os.fstat(fd).st_size, entry.size)
    return missing, begun, have


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive(entry: Entry, fd: int, have: int) -> bool:
    """Take the rest of a file; whether the whole then has the hash that was announced."""
    header = b""
    while len(header) < HEADER.size:
        header += some(HEADER.size - len(header))
    coming = HEADER.unpack(header)[0]
    with os.fdopen(os.dup(fd), "r+b", buffering=0) as file:
        os.ftruncate(fd, have)
        sha = hash_of(fd, have, checking())
        file.seek(have)
        left = coming
        while left:
            data = some(min(CHUNK, left))
            sha.update(data)
            left -= len(data)
            if left // SYNC_EVERY != (left + len(data)) // SYNC_EVERY:
                os.fdatasync(fd)  # a long one at the end would look like a hang
            if data == ZEROS[: len(data)]:
                file.seek(len(data), os.SEEK_CUR)  # a hole
            else:
                write_all(fd, data)
        os.ftruncate(fd, have + coming)
    return bool(sha.hexdigest() == entry.payload)


def take(entry: Entry, fd: int | None, have: int, *, stored: bool) -> bool:
    """Receive a file and give it its place."""
    partial = entry.partial
    if fd is None:
        fd = open_partial(partial)
    if fd is None:  # another transfer sends the same content right now
        partial = entry.partial + b".%d" % os.getpid()
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNERS)
    try:
        if not receive(entry, fd, have):
            os.unlink(partial)
            return False
        if stored:
            if entry.size > SYNCED:
                os.fsync(fd)
            remove_unless(stat.S_ISREG, entry.final)
        else:  # while it has no place, another transfer of the same content must be able to open it
            os.fchmod(fd, entry.mode & 0o777 | OWNERS)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        os.replace(partial, entry.final)
        if stored:
            seal(fd)
        else:
            os.fchmod(fd, entry.mode & 0o777)
    except BaseException:
        if partial != entry.partial:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        raise
    finally:
        os.close(fd)
    return True


def refuse_small_disk(folder: bytes, entries: list[Entry], missing: list[int], have: dict[int, int]) -> None:
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    needed = sum(entries[index].size - have.get(index, 0) for index in missing) + SPARE
    if needed > free:
        fail(folder, OSError(errno.ENOSPC, f"{needed >> 20} MiB are needed and {free >> 20} MiB are free"))


def read_entries() -> list[Entry]:
    """The request."""
    entries = []
    while (line := STDIN.readline()) != b"\n":
        if not line:
            sys.exit("the connection ended too soon")
        entries.append(Entry(json.loads(line)))
    return entries


def receive_all(entries: list[Entry], folder: bytes, *, stored: bool) -> list[int]:
    """Say what is missing and take it; returns the files that came with another hash."""
    missing, begun, have = find_missing(entries, stored=stored)
    refuse_small_disk(folder, entries, missing, have)
    tell(send=[[index, have.get(index, 0)] for index in missing])
    wrong = []
    for index in missing:
        entry = entries[index]
        try:
            if not take(entry, begun.pop(entry.partial, None), have.get(index, 0), stored=stored):
                wrong.append(index)
        except OSError as exc:
            fail(entry.path, exc)
    return wrong


def make_folder(path: bytes) -> None:
    """A folder, or a link to one, stays what it is; our own can be written to until all is in it."""
    if not os.path.isdir(path):
        os.mkdir(path, 0o700)
        return
    status = os.stat(path)
    if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(path, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)


def make_link(target: bytes, path: bytes) -> None:
    if os.path.islink(path):
        if os.readlink(path) == target:
            return
        os.unlink(path)
    os.symlink(target, path)


def make_places(into: bytes, entries: list[Entry]) -> None:
    """Folders and links, before files come; folders get their mode and time when all is in them."""
    for entry in entries:
        path = os.path.join(into, entry.path)
        try:
            if entry.kind == "folder":
                make_folder(path)
            elif entry.kind == "link":
                make_link(base64.b64decode(entry.payload), path)
            elif os.path.isdir(path) and not os.path.islink(path):
                raise IsADirectoryError(errno.EISDIR, "a folder is where a file should go")
        except OSError as exc:
            fail(entry.path, exc)


def finish_folders(into: bytes, entries: list[Entry]) -> None:
    for entry in reversed(entries):
        if entry.kind == "folder":
            path = os.path.join(into, entry.path)
            os.chmod(path, entry.mode & 0o777)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def receive_below(into: bytes, entries: list[Entry]) -> list[int]:
    os.makedirs(into, exist_ok=True)
    make_places(into, entries)
    files = [entry for entry in entries if entry.kind == "file"]
    for entry in files:
        entry.final = os.path.join(into, entry.path)
        name = b".clusterctl-" + entry.payload[:32].encode() + b".part"
        entry.partial = os.path.join(os.path.dirname(entry.final), name)
    wrong = receive_all(entries, os.path.abspath(into), stored=False)
    for entry in files:
        if os.path.exists(entry.final):  # it may have been here already
            os.chmod(entry.final, entry.mode & 0o777)
            os.utime(entry.final, ns=(entry.mtime_ns, entry.mtime_ns))
    finish_folders(into, entries)
    return wrong


def main(into: str) -> None:
    os.chdir(os.path.expanduser("~"))
    wrong = receive_below(os.fsencode(into), read_entries())
    folder = base64.b64encode(os.path.realpath(os.fsencode(into))).decode("ascii")
    tell(folder=folder, wrong=wrong)
