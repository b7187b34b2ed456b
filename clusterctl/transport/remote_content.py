"""The content of files, and the places that files get: for both ends of a transfer.

Runs here and on the cluster: standard library only, Python 3.9.

Whatever lists the files, it says a line each, KIND PATH MODE MTIME_NS SIZE SPACE PAYLOAD with a blank between
two, and an empty line. KIND is folder, file, link, or left, which does not travel. SPACE is what a file takes
on a disk; of what is left, how many files it is. PAYLOAD is a link's target, the sha256 of a file, if that is
known, or why something is left. Paths and targets are base64, since they may be any bytes. `alive` on a line
is a sign of life.

``send_wanted`` sends what is asked for: stdin brings a line with a JSON array of [KEY, HAVE, SIZE, SHA256]:
the files that are wanted, how many bytes of each are there already, how many it had when it was listed, and
the hash of what is there as a whole. KEY is the number of the line in the list, signs of life not counted.
For each in turn come eight bytes with the number of bytes that follow, these (see ``send_content``), and a
last piece: empty if the file held still meanwhile and came whole, else the 32 bytes of its sha256, read anew.
In place of the number stands -1 if the file can't be read or is shorter by now, or -2 if it has the hash that
was named; -3 is a sign of life. ``Incoming`` reads that.

As a program it lists and sends files and folders for `clusterctl get`. Arguments: what is wanted; relative
paths begin at the home folder. PATH then begins with the name of what was asked for. If something is
missing, the exit status is 67.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from clusterctl.transport.remote_open import (
    OWNERS,
    Opener,
    fail,
    lies_at,
    open_own,
    remove_unless,
)

CHUNK = 1 << 20
READ = 120_000  # bytes of a pipe at once; of more, glibc would map and clear the memory anew each time
ZEROS = bytes(CHUNK)
BUFFER = 1 << 16  # of small pieces; large ones are written from where they are
SMALL = 1 << 16  # bytes up to which a file travels as one piece
HEADER = struct.Struct(">q")
BLOCK = 512  # bytes of st_blocks
ALIVE_S = 1.0
UNREADABLE, SAME, ALIVE = -1, -2, -3
LEFT = "left"
ALIVE_LINE = "alive\n"
SETTLED_S = 2.0
NOT_THERE = 67
LONGEST_LINE = 1 << 20
DIGEST = 32  # bytes


class Beat:
    """Calls ``report`` when about a second went by since the last time, as a sign of life in long work."""

    def __init__(self, report: Callable[[], object]) -> None:
        self.report, self.due = report, time.monotonic() + ALIVE_S

    def __call__(self) -> None:
        if time.monotonic() >= self.due:
            self.report()
            self.due = time.monotonic() + ALIVE_S


def hash_of(fd: int, size: int, beat: Callable[[], object] = lambda: None) -> Any:
    """The hash of a file's first bytes, or of all if it is shorter."""
    sha, at, size = hashlib.sha256(), 0, size and min(size, os.fstat(fd).st_size)
    while at < size:
        data = ZEROS[: hole_at(fd, at, size)] or os.pread(fd, min(CHUNK, size - at), at)
        if not data:
            break
        sha.update(data)
        at += len(data)
        beat()
    return sha


def hole_at(fd: int, at: int, size: int) -> int:
    """How many bytes of a file from there on, up to ``size``, are a hole: they read as zeros."""
    try:
        return min(os.lseek(fd, at, os.SEEK_DATA), size) - at
    except OSError as exc:  # ENXIO: no data after that; else the file system can't tell
        return size - at if exc.errno == errno.ENXIO else 0


def data_at(fd: int, at: int, size: int) -> int:
    """How many bytes of a file from there on, up to ``size``, lie before the next hole."""
    try:
        return min(os.lseek(fd, at, os.SEEK_HOLE), size) - at
    except OSError:  # it became shorter meanwhile, or the file system can't tell
        return size - at


def send_content(out: BinaryIO, fd: int, at: int, size: int) -> None:
    """Send a file from ``at`` to ``size``.

    A small one from its beginning goes as it is. Else it goes in pieces: eight bytes with the length of the
    piece and the piece, or a negative length, of a hole that is not sent. What became shorter meanwhile is
    filled with zeros.
    """
    if size <= SMALL and not at:
        data = os.pread(fd, size, 0)
        while len(data) < size:
            data += os.pread(fd, size - len(data), len(data)) or bytes(size - len(data))
        out.write(data)
        return
    has_holes = os.fstat(fd).st_blocks * BLOCK < size
    while at < size:
        if has_holes and (hole := hole_at(fd, at, size)):
            out.write(HEADER.pack(-hole))
            at += hole
            continue
        length = min(CHUNK, data_at(fd, at, size) if has_holes else size - at)
        data = os.pread(fd, length, at) or ZEROS[: size - at]
        out.write(HEADER.pack(len(data)))
        out.write(data)
        at += len(data)


def send_alive(out: BinaryIO) -> None:
    out.write(HEADER.pack(ALIVE))
    out.flush()


def held_still(fd: int, before: os.stat_result) -> bool:
    """Whether a file is as it was, and was not written just before, within the resolution of its times."""
    after = os.fstat(fd)
    same = (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )
    return same and time.time() - max(before.st_mtime, before.st_ctime) > SETTLED_S


def send_file(out: BinaryIO, fd: int, have: int, size: int, sha256: str) -> None:
    before = os.fstat(fd)
    if before.st_size < size or size < have:
        out.write(HEADER.pack(UNREADABLE))
        return
    beat = Beat(lambda: send_alive(out))
    if sha256 and hash_of(fd, size, beat).hexdigest() == sha256:
        out.write(HEADER.pack(SAME))
        return
    have = 0 if sha256 else have
    out.write(HEADER.pack(size - have))
    send_rest(out, fd, have, size, before=before, beat=beat)


def send_rest(
    out: BinaryIO,
    fd: int,
    have: int,
    size: int,
    *,
    before: os.stat_result,
    beat: Callable[[], object] = lambda: None,
) -> None:
    """Send a file from ``have`` on, and the last piece; ``before``: when its size was looked at."""
    last = b""
    send_content(out, fd, have, size)
    if have or not held_still(fd, before):  # a log that only grew still begins with what was sent
        last = hash_of(fd, size, beat).digest()
    out.write(HEADER.pack(len(last)) + last)


def send_wanted(open_one: Callable[[Any], int]) -> None:
    """Send what stdin asks for; ``open_one`` opens a file by its key, or raises OSError."""
    wanted = json.loads(sys.stdin.buffer.readline() or "[]")
    with open(1, "wb", buffering=BUFFER, closefd=False) as out:
        for key, have, size, sha256 in wanted:
            try:
                fd = open_one(key)
            except OSError:
                out.write(HEADER.pack(UNREADABLE))
                continue
            try:
                send_file(out, fd, have, size, sha256)
            finally:
                os.close(fd)


class HashLater:
    """In place of a file's hash while it arrives: few need one, and these are read again."""

    def __init__(self, fd: int, size: int, beat: Callable[[], object]) -> None:
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
    """Reads what the other side sends; ``receive`` returns some of it, b"" at its end.

    ``beat`` is called while what is here already is read.
    """

    def __init__(self, receive: Callable[[], bytes], beat: Callable[[], object] = lambda: None) -> None:
        self.receive, self.beat = receive, beat
        self.buffer, self.at = b"", 0  # what came last, and how much of it was taken

    def fill(self) -> None:
        if self.at == len(self.buffer):
            self.buffer, self.at = self.receive(), 0
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
        start, end = self.at, self.at + HEADER.size
        if end > len(self.buffer):
            return int(HEADER.unpack(self.exactly(HEADER.size))[0])
        self.at = end
        return int(HEADER.unpack_from(self.buffer, start)[0])

    def announced(self, size: int, *, known: bool) -> int:
        """How a file begins: with ``size``, ``UNREADABLE``, or ``SAME`` if its hash was ``known`` here."""
        while (coming := self.number()) == ALIVE:
            pass
        if coming not in {size, UNREADABLE} and not (known and coming == SAME):
            raise UnexpectedError
        return coming

    def rest(
        self,
        fd: int,
        have: int,
        size: int,
        arrived: Callable[[int], object] = lambda _: None,
        *,
        hashed: bool = True,
    ) -> Any:
        """Take a file whose beginning is in ``fd``, as ``send_content`` sends it; the hash of the whole.

        What is zeros becomes a hole. Not ``hashed``: it is, once it is here, where its digest is asked for.
        """
        sha = hash_of(fd, have, self.beat) if hashed else HashLater(fd, size, self.beat)
        if os.fstat(fd).st_size > have:  # else ext4 would sync at close what was truncated to nothing
            os.ftruncate(fd, have)
        if size <= SMALL and not have:
            data = self.exactly(size)
            sha.update(data)
            write_all(fd, data)
            arrived(size)
        else:
            self.receive_content(fd, have, size, sha, arrived)
        return sha

    def receive_content(
        self, fd: int, have: int, size: int, sha: Any, arrived: Callable[[int], object]
    ) -> None:
        left, length = size - have, 0
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
                arrived(-length)
            for piece in self.chunks(max(0, length)):
                sha.update(piece)
                write_all(fd, piece)
                arrived(len(piece))
        if length < 0:
            os.ftruncate(fd, size)

    def arrives_whole(self, sha: Any) -> bool:
        """Whether a file, whose content has just come, held still meanwhile, or has the hash of what came."""
        while (length := self.number()) == ALIVE:
            pass
        if length not in {0, DIGEST}:
            raise UnexpectedError
        return not length or bool(self.exactly(length) == sha.digest())

    def end(self, *, goes_on: bool = False) -> None:
        """Wait for the end, unless the other side goes on later; nothing may be left."""
        if self.at < len(self.buffer) or (not goes_on and self.receive()):
            raise UnexpectedError


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Entry:
    """One line of a list; ``local`` is where it goes below a folder, its path but for what a run renames.

    ``final`` is that place as a whole, ``partial`` where a file arrives. ``is_new``: nothing is there yet,
    for its folder was made just now.
    """

    __slots__ = (
        *("final", "index", "is_new", "kind", "local", "mode"),
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
        self.is_new = False


def place_below(into: bytes, entry: Entry, key: str) -> None:
    """Say where it goes, and where a file arrives: beside that, under a name made of ``key``."""
    entry.final = os.path.join(into, entry.local)
    folder, _, _ = entry.final.rpartition(b"/")
    entry.partial = b"%s/.clusterctl-%s.part" % (folder, key[:32].encode())


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


def make_place(entry: Entry, new: set[bytes], *, follow: bool, replace: bool = False) -> None:
    """Make a folder or link, or see that a file can come; ``follow``: a link may stand for a folder.

    ``new`` are folders that were made just now, to which one that this makes is added. ``replace``: what
    stands in the way is removed.
    """
    entry.is_new = entry.final.rpartition(b"/")[0] in new
    if entry.is_new and entry.kind == "file":
        return
    if replace:
        remove_unless(stat.S_ISDIR if entry.kind == "folder" else stat.S_ISREG, entry.final)
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
    """Give a file or folder its mode and time."""
    os.chmod(place, entry.mode)
    os.utime(place, ns=(entry.mtime_ns, entry.mtime_ns))


def line_of(
    kind: str,
    path: bytes,
    payload: str | bytes = "",
    *,
    mode: int = 0,
    mtime_ns: int = 0,
    size: int = 0,
    space: int = 0,
) -> str:
    """A line of a list; ``payload`` is bytes if it is a link's target."""
    if isinstance(payload, bytes):
        payload = base64.b64encode(payload).decode("ascii")
    name = binascii.b2a_base64(path, newline=False).decode("ascii")
    return f"{kind} {name} {mode} {mtime_ns} {size} {space} {payload}\n"


def line_of_status(path: bytes, status: os.stat_result, target: bytes | None = None) -> str:
    """The line of a file, of a folder, of a link with its ``target``, or of what does not travel."""
    mode, mtime_ns = stat.S_IMODE(status.st_mode), status.st_mtime_ns
    if stat.S_ISREG(status.st_mode):
        size, space = status.st_size, status.st_blocks * BLOCK
        return line_of("file", path, mode=mode, mtime_ns=mtime_ns, size=size, space=space)
    kind = "folder" if stat.S_ISDIR(status.st_mode) else LEFT if target is None else "link"
    return line_of(kind, path, target or "", mode=mode, mtime_ns=mtime_ns)


def list_all(roots: list[bytes]) -> list[bytes]:
    """Tell what there is; returns where each thing lies."""
    missing = [os.fsdecode(root) for root in roots if not os.path.exists(root)]
    if missing:
        sys.stderr.write(", ".join(map(repr, missing)))
        sys.exit(NOT_THERE)
    places = []
    for root in roots:
        real = os.path.realpath(root)
        left = [(os.path.basename(os.path.abspath(root)), real)]
        while left:
            path, full = left.pop()
            status = os.stat(full, follow_symlinks=False)
            places.append(full)
            target = os.readlink(full) if stat.S_ISLNK(status.st_mode) else None
            sys.stdout.write(line_of_status(path, status, target))
            if stat.S_ISDIR(status.st_mode):
                names = sorted(entry.name for entry in os.scandir(full))
                left += [(path + b"/" + name, os.path.join(full, name)) for name in reversed(names)]
    sys.stdout.write("\n")
    sys.stdout.flush()
    return places


def main(*roots: str) -> None:
    os.chdir(os.path.expanduser("~"))
    try:
        places = list_all([os.fsencode(root) for root in roots])
    except OSError as exc:
        fail(exc.filename or b"", exc)
    opener = Opener(b"", any_owner=True)  # whoever owns them: the user has named them

    def open_one(index: int) -> int:
        nonlocal opener
        top, name = os.path.split(places[index])
        if top != opener.top:
            opener.close()
            opener = Opener(top, any_owner=True)
        return opener.open(name)

    send_wanted(open_one)
