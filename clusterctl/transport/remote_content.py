"""The content of files, and the places that files get: for both ends of a transfer, in either direction.

Runs here and on the cluster: standard library only, Python 3.9.

The sender lists the files, a line each: KIND PATH MODE MTIME_NS SIZE SPACE PAYLOAD with a blank between two,
and an empty line at the end. KIND is folder, file, link, or left, which does not travel. SPACE is the room of
a file on a disk; of a thing that is left, the number of files in it. PAYLOAD is a link's target, the sha256
of a file if it is known, or the reason why something is left. Paths and targets are base64, since they may be
any bytes.

The receiver asks for files, a line each: INDEX HAVE SIZE SHA256, and an empty line at the end. INDEX is the
number of the line in the list, HAVE how many bytes are there already, SIZE that of the list, and SHA256 the
hash of the whole file that is in its place, or "-". In both lists `alive` on a line is a sign of life.

For each file in turn the sender sends eight bytes with the number of bytes that follow, these bytes (see
``send_content``), and a last piece. That is empty if the file did not change meanwhile and was sent from its
beginning, else the 32 bytes of its sha256. Instead of the number stands -1 if the file can't be read or is
shorter by now, or -2 if it has the hash that the receiver named; -3 is a sign of life. ``Incoming`` and
``receive`` read that.

As a program it lists and sends files and folders for `clusterctl get`. Arguments: the paths; relative paths
begin at the home folder. PATH then begins with the name of the argument. If a path does not exist, the exit
status is 67.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import os
import stat
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from clusterctl.transport.remote_open import SILENT, Beat, Opener, fail

CHUNK = 1 << 20
READ = 120_000  # bytes of a pipe at once; of more, glibc would map and clear the memory anew each time
ZEROS = bytes(CHUNK)
BUFFER = 1 << 16  # of small pieces; large ones are written from where they are
HEADER = struct.Struct(">q")
BLOCK = 512  # bytes of st_blocks
UNREADABLE, SAME, ALIVE = -1, -2, -3
LEFT = "left"
ALIVE_LINE = b"alive"
SETTLED_S = 2.0
NOT_THERE = 67


def hash_of(fd: int, size: int, beat: Beat = SILENT) -> Any:
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
    """Send a file from ``at`` to ``size`` in pieces.

    Each is eight bytes with its length and the piece, or a negative length, of a hole that is not sent. A
    file that became shorter meanwhile is filled with zeros.
    """
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


def held_still(fd: int, before: os.stat_result) -> bool:
    """Whether a file is as it was, and was not written just before, within the resolution of its times."""
    after = os.fstat(fd)
    same = (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )
    return same and time.time() - max(before.st_mtime, before.st_ctime) > SETTLED_S


def send_file(out: BinaryIO, fd: int, have: int, size: int, sha256: str = "") -> None:
    """Send a file that had ``size`` bytes when it was listed, from ``have`` on, or as a whole.

    sha256: the hash of the file in its place at the other end. If it is this file's, nothing is sent.
    """
    before, beat = os.fstat(fd), Beat(out, HEADER.pack(ALIVE))
    if before.st_size < size or size < have:
        out.write(HEADER.pack(UNREADABLE))
        return
    if sha256 and hash_of(fd, size, beat).hexdigest() == sha256:
        out.write(HEADER.pack(SAME))
        return
    have, last = 0 if sha256 else have, b""
    out.write(HEADER.pack(size - have))
    send_content(out, fd, have, size)
    if have or not held_still(fd, before):  # a log that only grew still begins with what was sent
        last = hash_of(fd, size, beat).digest()
    out.write(HEADER.pack(len(last)) + last)


def wanted_of(line: bytes) -> tuple[int, int, int, str]:
    """Return a line of the receiver's: INDEX, HAVE, SIZE, SHA256; raises ValueError for any other line."""
    index, have, size, sha256 = line.split()
    return int(index), int(have), int(size), "" if sha256 == b"-" else sha256.decode()


def send_wanted(opener: Opener, paths: Sequence[bytes]) -> None:
    """Send the files that stdin asks for, by their numbers among these paths."""
    # All are read before the first is sent: the other end does not read while it asks.
    wanted = []
    while line := sys.stdin.buffer.readline().rstrip(b"\n"):
        wanted.append(wanted_of(line))
    with open(1, "wb", buffering=BUFFER, closefd=False) as out:
        for index, have, size, sha256 in wanted:
            try:
                fd = opener.open(paths[index])
            except OSError:
                out.write(HEADER.pack(UNREADABLE))
                continue
            try:
                send_file(out, fd, have, size, sha256)
            finally:
                os.close(fd)


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
    # Whoever owns the files: the user has named them.
    send_wanted(Opener(b"/", any_owner=True), [place.lstrip(b"/") for place in places])
