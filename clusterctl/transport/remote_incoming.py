"""The receiver's part of a file transfer (see remote_content.py): receive files and write them to
disk.

Runs on this machine and on the cluster: standard library only, Python 3.9.
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

from clusterctl.transport.remote_content import ALIVE, HEADER, SAME, UNREADABLE, ZEROS, hash_of
from clusterctl.transport.remote_open import (
    NO_BEAT,
    OWNERS,
    KeepAlive,
    is_same_file,
    open_own,
    remove_unless,
)

# Bytes up to which a new folder's file arrives without a name, in an O_TMPFILE.
SMALL = 1 << 16
LONGEST_LINE = 1 << 20
MAX_OPEN = 256  # partial files
SPARE = 16 << 20  # bytes kept free
# Bytes from which a file of the store is synced before it is renamed.
SYNCED = 1 << 20
SYNC_EVERY = 1 << 28
DIGEST = 32  # bytes


class HashLater:
    """Object like a sha256 that ignores arriving data: ``digest`` reads and hashes the complete
    file.
    """

    def __init__(self, fd: int, size: int, beat: KeepAlive) -> None:
        self.fd = fd
        self.size = size
        self.beat = beat

    def update(self, data: bytes | memoryview) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(hash_of(self.fd, self.size, self.beat).digest())


class TruncatedError(Exception):
    """The sender's data ended early."""


class UnexpectedError(Exception):
    """The sender's data do not follow the protocol of remote_content.py."""


class Incoming:
    """Parser of the sender's data. beat: called while a local file is hashed, to send
    keep-alives.
    """

    def __init__(self, stream: Iterator[bytes], beat: KeepAlive = NO_BEAT) -> None:
        self.stream = stream
        self.beat = beat
        # The last piece received, and the bytes of it that are consumed.
        self.buffer = b""
        self.at = 0

    def fill(self) -> None:
        if self.at == len(self.buffer):
            self.buffer = next(self.stream, b"")
            self.at = 0
            if not self.buffer:
                raise TruncatedError

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes as they arrive."""
        while size:
            self.fill()
            piece = memoryview(self.buffer)[self.at : self.at + size]
            self.at += len(piece)
            size -= len(piece)
            yield piece

    def exactly(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        start = self.at
        end = self.at + size
        if end > len(self.buffer):
            return b"".join(self.chunks(size))
        self.at = end
        return self.buffer[start:end]

    def line(self) -> bytes:
        """Return the next line, without its line feed."""
        line = b""
        while len(line) <= LONGEST_LINE:
            self.fill()
            start = self.at
            end = self.buffer.find(b"\n", self.at)
            if end >= 0:
                self.at = end + 1
                return line + self.buffer[start:end]
            line = line + self.buffer[start:]
            self.at = len(self.buffer)
        raise UnexpectedError

    def number(self) -> int:
        """Return the next eight bytes as an integer."""
        return int(HEADER.unpack(self.exactly(HEADER.size))[0])

    def read_header(self, size: int, *, has_hash: bool) -> int:
        """Return the number sent before a file: ``size``, ``UNREADABLE`` or, if ``has_hash``,
        ``SAME``.
        """
        while (header := self.number()) == ALIVE:
            pass
        if header not in {size, UNREADABLE} and not (has_hash and header == SAME):
            raise UnexpectedError
        return header

    def receive_rest(
        self, fd: int, have: int, size: int, *, stored: bool = False, hashed: bool = True
    ) -> Any:
        """Receive the rest of a file that ``send_content`` sends. Return the file's sha256 object.

        fd: the file, which holds the first ``have`` of ``size`` bytes. Holes of the sent file stay
            holes.
        stored: whether to sync the file to disk at intervals, so that a later sync is short.
        hashed: whether to hash the file as it arrives. If not, the sha256 object reads the file
            when needed.
        """
        sha = hash_of(fd, have, self.beat) if hashed else HashLater(fd, size, self.beat)
        # Only if longer, because ext4 syncs a file at close that was truncated to nothing.
        if os.fstat(fd).st_size > have:
            os.ftruncate(fd, have)
        remaining = size - have
        length = 0
        unsynced = 0
        os.lseek(fd, have, os.SEEK_SET)
        while remaining:
            length = self.number()
            if not 0 < abs(length) <= remaining:
                raise UnexpectedError
            remaining -= abs(length)
            if length < 0:
                os.lseek(fd, -length, os.SEEK_CUR)
            for offset in range(0, -length if hashed else 0, len(ZEROS)):
                sha.update(ZEROS[: -length - offset])
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

    def is_complete(self, sha: Any) -> bool:
        """Read the end of a sent file. Return whether it confirms ``sha``, the hash of the received
        data.
        """
        while (length := self.number()) == ALIVE:
            pass
        if length not in {0, DIGEST}:
            raise UnexpectedError
        return not length or bool(self.exactly(length) == sha.digest())

    def end(self, *, more_follows: bool = False) -> None:
        """Raise UnexpectedError if unread data remain. more_follows: don't wait for the end of the
        stream.
        """
        if self.at < len(self.buffer) or (not more_follows and next(self.stream, b"")):
            raise UnexpectedError


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class IncomingEntry:
    """A file, folder or link in the sender's list, and its place on the receiver's disk.

    local: path below the target folder. It differs from ``path`` if the collection of a run renames
        the file.
    final, partial: full path of the complete file, and of the file while it arrives.
    is_new: whether this transfer created the file's folder. known: sha256 of the existing file at
        ``final`` if it has the listed size, otherwise "". fd: the open partial file, with the first
        ``have`` bytes.
    """

    __slots__ = (
        "fd",
        "final",
        "have",
        "index",
        "is_new",
        "kind",
        "known",
        "local",
        "mode",
        "mtime_ns",
        "partial",
        "path",
        "payload",
        "size",
        "space",
    )

    def __init__(self, line: bytes, index: int = 0) -> None:
        """Parse a line of the list. Raises ValueError if the line is invalid."""
        kind, path, mode, mtime_ns, size, space, payload = line.split(b" ", 6)
        self.index = index
        self.kind = kind.decode()
        self.payload = payload.decode()
        self.path = self.local = binascii.a2b_base64(path)
        self.mode = int(mode) & 0o777
        self.mtime_ns = int(mtime_ns)
        self.size = int(size)
        self.space = int(space)
        self.final = self.partial = b""
        self.is_new = False
        self.known = ""
        self.have = 0
        self.fd: int | None = None

    @property
    def request_line(self) -> bytes:
        sha256 = self.known or "-"
        return b"%d %d %d %s\n" % (self.index, self.have, self.size, sha256.encode())


def make_places(
    into: bytes, entries: Iterable[IncomingEntry], *, follow: bool, own: bool = False
) -> None:
    """Set ``final`` and ``partial`` of entries to paths below ``into``. Create the folders and
    links.

    follow: whether a link to a folder is accepted as a folder.
    own: whether only clusterctl writes below ``into``. If so, an existing file of another kind,
        such as a link with the name of a folder, is removed. If not, it raises OSError.
    """
    os.makedirs(into, exist_ok=True)
    # These folders are new or empty, so no file in them can be overwritten.
    new = set() if os.listdir(into) else {into}
    for entry in entries:
        entry.final = os.path.join(into, entry.local)
        # The key includes size and time, so a partial file is always the beginning of the listed
        # file.
        key = hashlib.sha256(b"%s\0%d\0%d" % (entry.path, entry.size, entry.mtime_ns)).hexdigest()
        folder, _, _ = entry.final.rpartition(b"/")
        entry.partial = b"%s/.clusterctl-%s.part" % (folder, key[:32].encode())
        make_place(entry, new, follow=follow, own=own)


def is_unchanged(entry: IncomingEntry, beat: KeepAlive = NO_BEAT) -> bool:
    """Return whether a file has the entry's size, time and mode. If so, its access time becomes
    now.

    Such a file is not read, as by rsync. A file with another time is compared by its hash.
    """
    beat()
    if entry.is_new:
        return False
    try:
        status = os.lstat(entry.final)
        if (status.st_mode, status.st_size, status.st_mtime_ns) != (
            stat.S_IFREG | entry.mode,
            entry.size,
            entry.mtime_ns,
        ):
            return False
        os.utime(entry.final, ns=(time.time_ns(), entry.mtime_ns))
        return True
    except OSError:
        return False


def find_existing(files: Iterable[IncomingEntry], beat: KeepAlive = NO_BEAT) -> None:
    """For each file, hash the existing complete file, or open the partial file of an earlier
    transfer.
    """
    open_paths: set[bytes] = set()
    for entry in files:
        if entry.is_new or entry.kind != "file":
            continue
        # If the list has the file's hash, the caller has already compared the complete file with
        # it.
        entry.known = "" if entry.payload else entry.known or hash_in_place(entry, beat)
        if entry.known or entry.partial in open_paths or len(open_paths) == MAX_OPEN:
            continue
        if os.path.lexists(entry.partial):
            entry.fd = open_partial(entry.partial)
            if entry.fd is not None:
                open_paths.add(entry.partial)
                entry.have = min(os.fstat(entry.fd).st_size, entry.size)


def hash_in_place(entry: IncomingEntry, beat: KeepAlive) -> str:
    """Return the hash of the existing file at an entry's path; "" if it has another size or can't
    be read.
    """
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


def reject_small_disk(folder: bytes, files: Sequence[IncomingEntry]) -> None:
    """Raise NoRoomError if the disk of ``folder``, which need not exist, lacks space for the
    missing data.
    """
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    missing = {entry.path: max(0, entry.space - entry.have) for entry in files if not entry.known}
    free = status.f_bavail * status.f_frsize
    needed = sum(missing.values()) + SPARE
    if missing and needed > free:
        largest = max(missing, key=lambda path: missing[path])
        details = (
            f"{needed >> 20} MiB are needed, and {free >> 20} MiB are free; the largest file is "
        )
        details += f"{os.fsdecode(largest)!r} with {missing[largest] >> 20} MiB"
        raise NoRoomError(errno.ENOSPC, details, folder)


def receive(
    entry: IncomingEntry, incoming: Incoming, *, stored: bool = False, hashed: bool = False
) -> str | None:
    """Receive a file and rename it once it is complete. Return its sha256, or "" if not ``hashed``.

    Return None if the file is incomplete, can't be read by the sender, or does not have the listed
    hash.
    stored: whether the file is for the file store. If so, sync it, and replace a link or folder of
        its name.
    """
    header = incoming.read_header(entry.size - entry.have, has_hash=bool(entry.known))
    if header == SAME:
        finish(entry.final, entry)
        return entry.known
    if header == UNREADABLE:
        return None
    fd, partial = open_arriving(entry)
    # Keep a partial file for the next transfer if this one is interrupted.
    stays = partial == entry.partial
    try:
        sha = incoming.receive_rest(fd, entry.have, entry.size, stored=stored, hashed=hashed)
        sha256 = sha.hexdigest() if hashed else ""
        if not incoming.is_complete(sha) or entry.payload not in {"", sha256}:
            stays = False
            return None
        if stored:
            if entry.size > SYNCED:
                os.fsync(fd)
            remove_unless(stat.S_IFREG, entry.final)
        if partial:
            os.replace(partial, entry.final)
            # After the rename, because until then another transfer of the file must be able to open
            # it.
            finish(fd, entry)
        else:
            link_into_place(fd, entry)
        return sha256
    finally:
        os.close(fd)
        if partial and not stays:
            with contextlib.suppress(OSError):
                os.unlink(partial)


def close_partial_files(files: Iterable[IncomingEntry]) -> None:
    """Close the partial files that are still open, because their transfer has ended early."""
    for entry in files:
        if entry.fd is not None:
            os.close(entry.fd)
            entry.fd = None


def open_arriving(entry: IncomingEntry) -> tuple[int, bytes]:
    """Open a file for an entry's content. Return (descriptor, path); path b"" if it has no name
    yet.
    """
    fd = entry.fd
    entry.fd = None
    if fd is not None:
        return fd, entry.partial
    if (fd := open_unnamed(entry)) is not None:
        return fd, b""
    if (fd := open_partial(entry.partial)) is not None:
        return fd, entry.partial
    # Another transfer is receiving the same file.
    partial = entry.partial + b".%d" % os.getpid()
    return os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNERS), partial


def open_partial(path: bytes) -> int | None:
    """Open (or create) and lock a partial file. Return None if another transfer is writing the
    file.
    """
    fd = open_own(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If it is a different file, the other transfer has just put this one into place.
        if is_same_file(path, fd):
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def open_unnamed(entry: IncomingEntry) -> int | None:
    """Open a file that has no name until ``link_into_place`` names it. This is faster than a
    rename.

    Returns None if the entry is not a small file of a new folder, or O_TMPFILE is not supported.
    """
    if entry.is_new and entry.size <= SMALL and hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):
            return os.open(
                os.path.dirname(entry.final), os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, OWNERS
            )
    return None


def link_into_place(fd: int, entry: IncomingEntry) -> None:
    """Set the name, mode and time of a file that ``open_unnamed`` opened."""
    finish(fd, entry)
    # With src_dir_fd set, os.link follows this link to the open file (see linkat(2)).
    descriptor_path = b"/proc/self/fd/%d" % fd
    try:
        os.link(descriptor_path, entry.final, src_dir_fd=fd)
    except FileExistsError:
        temporary = entry.partial + b".%d" % os.getpid()
        os.link(descriptor_path, temporary, src_dir_fd=fd)
        os.replace(temporary, entry.final)


def make_place(entry: IncomingEntry, new: set[bytes], *, follow: bool, own: bool) -> None:
    """Create the entry's folder or link. For a file, raise OSError if a folder has the file's name.

    new: paths of the folders that this transfer has created. follow, own: see ``make_places``.
    """
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
        raise IsADirectoryError(errno.EISDIR, "a folder has the name of this file", entry.final)


def make_folder(path: bytes, *, follow: bool) -> bool:
    """Create a folder, or make an existing folder writable for its owner. Return whether it was
    created.
    """
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
    if b"\0" in target:
        raise OSError(errno.EINVAL, "the target of this link holds a NUL character", path)
    if os.path.islink(path):
        if os.readlink(path) == target:
            return
        os.unlink(path)
    os.symlink(target, path)


def finish_places(entries: Iterable[IncomingEntry]) -> None:
    """Set mode and time of files and folders to the listed values: a folder's after those of its
    content.
    """
    for entry in reversed([*entries]):
        if entry.kind != "link" and os.path.exists(entry.final):
            finish(entry.final, entry)


def finish(target: bytes | int, entry: IncomingEntry) -> None:
    """Set the mode and modification time of a file or folder. Its access time becomes now."""
    os.chmod(target, entry.mode)
    os.utime(target, ns=(time.time_ns(), entry.mtime_ns))
