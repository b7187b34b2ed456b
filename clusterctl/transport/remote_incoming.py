"""Files that arrive, and the places that they get: for both ends of a transfer, see remote_content.py.

Runs here and on the cluster: standard library only, Python 3.9.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from clusterctl.transport.remote_content import (
    ALIVE,
    HEADER,
    SAME,
    UNREADABLE,
    ZEROS,
    hash_of,
)
from clusterctl.transport.remote_open import OWNERS, SILENT, Beat, lies_at, open_own, remove_unless

SMALL = 1 << 16  # bytes up to which a file of a new folder has no name before it is whole
LONGEST_LINE = 1 << 20
MAX_OPEN = 256  # partial files that are held open
SPARE = 16 << 20  # bytes that a disk keeps
SYNCED = 1 << 20  # bytes from which a file of the store is on disk before it has its name
SYNC_EVERY = 1 << 28
DIGEST = 32  # bytes


class HashLater:
    """In place of a file's hash while it arrives: few need one, and these are read again."""

    def __init__(self, fd: int, size: int, beat: Beat) -> None:
        self.fd, self.size, self.beat = fd, size, beat

    def update(self, data: bytes | memoryview) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(hash_of(self.fd, self.size, self.beat).digest())


class TruncatedError(Exception):
    """The other side ended before it had sent all."""


class UnexpectedError(Exception):
    """The other side sent what it had not announced."""


class Incoming:
    """Reads what the other side sends, piece by piece.

    ``beat`` is a sign of life while a file that is here is read.
    """

    def __init__(self, stream: Iterator[bytes], beat: Beat = SILENT) -> None:
        self.stream, self.beat = stream, beat
        self.buffer, self.at = b"", 0  # what came last, and how much of it was taken

    def fill(self) -> None:
        if self.at == len(self.buffer):
            self.buffer, self.at = next(self.stream, b""), 0
            if not self.buffer:
                raise TruncatedError

    def chunks(self, size: int) -> Iterator[memoryview]:
        """So many bytes, as they come."""
        while size:
            self.fill()
            piece = memoryview(self.buffer)[self.at : self.at + size]
            self.at += len(piece)
            size -= len(piece)
            yield piece

    def exactly(self, size: int) -> bytes:
        """So many bytes, few enough to be one piece."""
        start, end = self.at, self.at + size
        if end > len(self.buffer):
            return b"".join(self.chunks(size))
        self.at = end
        return self.buffer[start:end]

    def line(self) -> bytes:
        """The bytes up to the next line feed, which is dropped."""
        line = b""
        while len(line) <= LONGEST_LINE:
            self.fill()
            start, end = self.at, self.buffer.find(b"\n", self.at)
            if end >= 0:
                self.at = end + 1
                return line + self.buffer[start:end]
            line, self.at = line + self.buffer[start:], len(self.buffer)
        raise UnexpectedError

    def number(self) -> int:
        """The next eight bytes."""
        return int(HEADER.unpack(self.exactly(HEADER.size))[0])

    def announced(self, size: int, *, known: bool) -> int:
        """How a file begins: with ``size``, ``UNREADABLE``, or ``SAME`` if its hash was ``known`` here."""
        while (coming := self.number()) == ALIVE:
            pass
        if coming not in {size, UNREADABLE} and not (known and coming == SAME):
            raise UnexpectedError
        return coming

    def rest(self, fd: int, have: int, size: int, *, stored: bool = False, hashed: bool = True) -> Any:
        """Take a file whose beginning is in ``fd``, as ``send_content`` sends it; the hash of the whole.

        Zeros that are not sent become a hole. Not ``hashed``: the file is hashed when its digest is asked
        for. ``stored``: what has come is written to the disk now and then, since a long sync at the end would
        look like a hang.
        """
        sha = hash_of(fd, have, self.beat) if hashed else HashLater(fd, size, self.beat)
        if os.fstat(fd).st_size > have:  # else ext4 would sync at close what was truncated to nothing
            os.ftruncate(fd, have)
        left, length, unsynced = size - have, 0, 0
        os.lseek(fd, have, os.SEEK_SET)
        while left:
            length = self.number()
            if abs(length) > left:
                raise UnexpectedError
            left -= abs(length)
            for done in range(0, -length, len(ZEROS)):
                sha.update(ZEROS[: -length - done])
            if length < 0:
                os.lseek(fd, -length, os.SEEK_CUR)
            for piece in self.chunks(max(0, length)):
                sha.update(piece)
                write_all(fd, piece)
                unsynced += len(piece)
            if stored and unsynced >= SYNC_EVERY:
                os.fdatasync(fd)
                unsynced = 0
        if length < 0:
            os.ftruncate(fd, size)
        return sha

    def arrives_whole(self, sha: Any) -> bool:
        """Whether a file, whose content has just come, held still meanwhile, or has the hash of what came."""
        while (length := self.number()) == ALIVE:
            pass
        if length not in {0, DIGEST}:
            raise UnexpectedError
        return not length or bool(self.exactly(length) == sha.digest())

    def end(self, *, goes_on: bool = False) -> None:
        """Wait for the end, unless the other side goes on later; nothing may be left."""
        if self.at < len(self.buffer) or (not goes_on and next(self.stream, b"")):
            raise UnexpectedError


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Entry:
    """One line of a list; ``local`` is where it goes below a folder, its path but for what a run renames.

    ``final`` is that place as a whole, ``partial`` where a file arrives. ``is_new``: nothing is there yet,
    for its folder was made just now. Else ``known`` is the hash of the file in its place, if that may be the
    same; or ``fd`` is its open partial file, which has ``have`` bytes.
    """

    __slots__ = (
        *("fd", "final", "have", "index", "is_new", "kind", "known", "local", "mode"),
        *("mtime_ns", "partial", "path", "payload", "size", "space"),
    )

    def __init__(self, line: bytes, index: int = 0) -> None:
        """Raises ValueError where the line is none."""
        kind, path, mode, mtime_ns, size, space, payload = line.split(b" ", 6)
        self.index = index
        self.kind, self.payload = kind.decode(), payload.decode()
        self.path = self.local = binascii.a2b_base64(path)
        self.mode, self.mtime_ns = int(mode) & 0o777, int(mtime_ns)
        self.size, self.space = int(size), int(space)
        self.final = self.partial = b""
        self.is_new, self.known, self.have = False, "", 0
        self.fd: int | None = None

    @property
    def wanted(self) -> bytes:
        """The line that asks for it."""
        sha256 = self.known or "-"
        return b"%d %d %d %s\n" % (self.index, self.have, self.size, sha256.encode())


def make_places(into: bytes, entries: Iterable[Entry], *, follow: bool, own: bool = False) -> None:
    """Find the place of each entry, and where a file arrives: beside that. Make folders and links.

    follow: a link may stand for a folder. ``own``: nothing else writes there, so what stands in the way, such
    as a link in place of a folder, is removed.

    Raises:
        OSError: something is in the way.
    """
    os.makedirs(into, exist_ok=True)
    # Folders that have just been made.
    new = set() if os.listdir(into) else {into}
    for entry in entries:
        entry.final = os.path.join(into, entry.local)
        # A partial file is the beginning of the very file that is in the list.
        key = hashlib.sha256(b"%s\0%d\0%d" % (entry.path, entry.size, entry.mtime_ns)).hexdigest()
        folder, _, _ = entry.final.rpartition(b"/")
        entry.partial = b"%s/.clusterctl-%s.part" % (folder, key[:32].encode())
        make_place(entry, new, follow=follow, own=own)


def find_begun(files: Iterable[Entry], beat: Beat = SILENT) -> None:
    """Find what is here of each file already: a file in its place, or the beginning of it."""
    begun: set[bytes] = set()
    for entry in files:
        if entry.is_new or entry.kind != "file":
            continue
        # If the list has its hash, the place was looked at already.
        entry.known = "" if entry.payload else entry.known or hash_in_place(entry, beat)
        if entry.known or entry.partial in begun or len(begun) == MAX_OPEN:
            continue
        if os.path.lexists(entry.partial):
            entry.fd = open_partial(entry.partial)
            if entry.fd is not None:
                begun.add(entry.partial)
                entry.have = min(os.fstat(entry.fd).st_size, entry.size)


def hash_in_place(entry: Entry, beat: Beat) -> str:
    """The hash of the file in an entry's place; "" if there is none of its size that can be read."""
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


class NoRoomError(OSError):
    """The files do not fit on the disk."""


def reject_small_disk(folder: bytes, files: Sequence[Entry]) -> None:
    """Raise NoRoomError if the rest of these files does not fit on the disk of a folder.

    The folder need not exist yet.
    """
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    rest = {entry.path: max(0, entry.space - entry.have) for entry in files if not entry.known}
    free, needed = status.f_bavail * status.f_frsize, sum(rest.values()) + SPARE
    if rest and needed > free:
        largest = max(rest, key=lambda path: rest[path])
        why = f"{needed >> 20} MiB are needed, and {free >> 20} MiB are free; the largest file is "
        why += f"{os.fsdecode(largest)!r} with {rest[largest] >> 20} MiB"
        raise NoRoomError(errno.ENOSPC, why, folder)


def receive(entry: Entry, incoming: Incoming, *, stored: bool = False, hashed: bool = False) -> str | None:
    """Receive a file, which gets its place once it is whole. Return its hash, "" if not ``hashed``.

    stored: it goes to the store, where anything else in its place is replaced. Returns None if it did not
    come whole, or has another hash than the list says.
    """
    coming = incoming.announced(entry.size - entry.have, known=bool(entry.known))
    if coming == SAME:
        finish(entry.final, entry)
        return entry.known
    if coming == UNREADABLE:
        return None
    fd, partial = open_arriving(entry)
    # What has arrived of a file stays for the next time.
    stays = partial == entry.partial
    try:
        sha = incoming.rest(fd, entry.have, entry.size, stored=stored, hashed=hashed)
        sha256 = sha.hexdigest() if hashed else ""
        if not incoming.arrives_whole(sha) or entry.payload not in {"", sha256}:
            stays = False
            return None
        if stored:
            if entry.size > SYNCED:
                os.fsync(fd)
            remove_unless(stat.S_IFREG, entry.final)
        if partial:
            os.replace(partial, entry.final)
            # Before, another transfer of the same file must be able to open it.
            finish(fd, entry)
        else:
            name_it(fd, entry)
        return sha256
    finally:
        os.close(fd)
        if partial and not stays:
            with contextlib.suppress(OSError):
                os.unlink(partial)


def close_begun(files: Iterable[Entry]) -> None:
    """Close the partial files that did not come."""
    for entry in files:
        if entry.fd is not None:
            os.close(entry.fd)
            entry.fd = None


def open_arriving(entry: Entry) -> tuple[int, bytes]:
    """Open the file in which an entry's content arrives. Returns its path too, b"" if it has none yet."""
    fd, entry.fd = entry.fd, None
    if fd is not None:
        return fd, entry.partial
    if (fd := open_unnamed(entry)) is not None:
        return fd, b""
    if (fd := open_partial(entry.partial)) is not None:
        return fd, entry.partial
    # Another transfer brings the same file right now.
    partial = entry.partial + b".%d" % os.getpid()
    return os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNERS), partial


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


def open_unnamed(entry: Entry) -> int | None:
    """Where a small file of a new folder arrives: it has no name before ``name_it`` gives it its own.

    So nobody else writes to it, nothing is left of it if it does not come whole, and it costs two thirds of
    the time of a file that is renamed. None if it is no such file, or the file system has none without names.
    """
    if entry.is_new and entry.size <= SMALL and hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):
            return os.open(os.path.dirname(entry.final), os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, OWNERS)
    return None


def name_it(fd: int, entry: Entry) -> None:
    """Give a file of ``open_unnamed`` its place, with its mode and time."""
    finish(fd, entry)
    here = b"/proc/self/fd/%d" % fd  # linkat(2); with a folder to begin at, os.link follows that to the file
    try:
        os.link(here, entry.final, src_dir_fd=fd)
    except FileExistsError:
        beside = entry.partial + b".%d" % os.getpid()
        os.link(here, beside, src_dir_fd=fd)
        os.replace(beside, entry.final)


def make_place(entry: Entry, new: set[bytes], *, follow: bool, own: bool) -> None:
    """Make a folder or link, or see that a file can come."""
    entry.is_new = entry.final.rpartition(b"/")[0] in new
    if entry.is_new and entry.kind == "file":
        return
    if own:
        remove_unless(stat.S_IFDIR if entry.kind == "folder" else stat.S_IFREG, entry.final)
    if entry.kind == "folder":
        if make_folder(entry.final, follow=follow):
            new.add(entry.final)
    elif entry.kind == "link":
        make_link(base64.b64decode(entry.payload), entry.final)
    elif os.path.isdir(entry.final) and not os.path.islink(entry.final):
        raise IsADirectoryError(errno.EISDIR, "a folder is where a file should go", entry.final)


def make_folder(path: bytes, *, follow: bool) -> bool:
    """Have a folder; our own can be written to until all is in it. Whether it was made."""
    try:
        os.mkdir(path, 0o700)
        return True
    except FileExistsError:
        status = os.stat(path, follow_symlinks=follow)
        if not stat.S_ISDIR(status.st_mode):
            raise
        if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
    return False


def make_link(target: bytes, path: bytes) -> None:
    if os.path.islink(path):
        if os.readlink(path) == target:
            return
        os.unlink(path)
    os.symlink(target, path)


def finish_places(entries: Iterable[Entry]) -> None:
    """Files and folders that are there get their modes and times, folders after what is in them."""
    for entry in reversed([*entries]):
        if entry.kind != "link" and os.path.exists(entry.final):
            finish(entry.final, entry)


def finish(place: bytes | int, entry: Entry) -> None:
    """Give a file or folder its mode and its time of change. Its time of access is now."""
    os.chmod(place, entry.mode)
    os.utime(place, ns=(time.time_ns(), entry.mtime_ns))
