"""Protocol of a file transfer between this machine and the cluster, in both directions: the
sender's part.

Runs on this machine and on the cluster: standard library only, Python 3.9.

The sender lists the files, one per line: KIND PATH MODE MTIME_NS SIZE SPACE PAYLOAD, separated by
blanks. An empty line ends the list. KIND is folder, file, link, or left (not sent). SPACE is the
disk space of a file. For KIND left, SPACE is the number of files, and MODE is 1 if `down` refuses to
delete them. PAYLOAD is the target of a link, the
sha256 of a file if known or ``CHANGED``, or the reason for KIND left. Paths and targets are base64,
since they may hold any bytes.

The receiver requests files, one per line: INDEX HAVE SIZE SHA256, with an empty line at the end.
INDEX is the number of the line in the list, HAVE the number of bytes that the receiver has, SIZE
the size in the list, and SHA256 the hash of the receiver's complete file, or "-". In both lists,
`alive` on a line is a keep-alive.

For each requested file the sender sends eight bytes with the number of bytes to follow, these bytes
(see ``send_content``), and a last piece: empty if the file did not change and was sent from its
beginning, otherwise the 32 bytes of its sha256. Instead of the number, -1 means that the file can't
be read or is now shorter, -2 that it has the requested hash, and -3 is a keep-alive.
remote_incoming.py reads this stream.

As a program, this module lists and sends files and folders for `clusterctl get`. Arguments: the
paths. Relative paths start at the home folder. In the list, a PATH begins with the last part of its
argument. If an argument does not exist, the exit status is 67.
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

from clusterctl.transport.remote_open import NO_BEAT, FileOpener, KeepAlive, fail

CHUNK = 1 << 20
# Bytes read from a pipe at once. For more, glibc would map and clear the memory for each read.
READ = 120_000
ZEROS = bytes(CHUNK)
BUFFER = 1 << 16  # bytes
HEADER = struct.Struct(">q")
BLOCK = 512  # bytes of st_blocks
UNREADABLE = -1
SAME = -2
ALIVE = -3
LEFT = "left"
CHANGED = "changed"
ALIVE_LINE = b"alive"
SETTLED_S = 2.0
NOT_THERE = 67


def hash_of(fd: int, size: int, beat: KeepAlive = NO_BEAT) -> Any:
    """Return a sha256 object of a file's first ``size`` bytes, or of the whole file if it is
    shorter.
    """
    sha = hashlib.sha256()
    offset = 0
    size = size and min(size, os.fstat(fd).st_size)
    while offset < size:
        data = ZEROS[: hole_at(fd, offset, size)] or os.pread(fd, min(CHUNK, size - offset), offset)
        if not data:
            break
        sha.update(data)
        offset += len(data)
        beat()
    return sha


def hole_at(fd: int, offset: int, size: int) -> int:
    """Return the length of a sparse file's hole at ``offset``, counted up to byte ``size``; 0: no
    hole.
    """
    try:
        return min(os.lseek(fd, offset, os.SEEK_DATA), size) - offset
    except OSError as exc:
        # The error ENXIO means that no data follows the offset, any other error that the file
        # system does not report holes.
        return size - offset if exc.errno == errno.ENXIO else 0


def data_at(fd: int, offset: int, size: int) -> int:
    """Return the number of bytes from ``offset`` to the file's next hole, counted up to byte
    ``size``.
    """
    try:
        return min(os.lseek(fd, offset, os.SEEK_HOLE), size) - offset
    except OSError:
        # The file has become shorter, or the file system does not report holes.
        return size - offset


def send_content(out: BinaryIO, fd: int, offset: int, size: int) -> None:
    """Send the bytes of a file from ``offset`` to ``size`` in pieces.

    A piece is its length in eight bytes, followed by its bytes. A hole is sent as its negative
    length only. If the file has become shorter, zeros are sent for the missing bytes.
    """
    has_holes = os.fstat(fd).st_blocks * BLOCK < size
    while offset < size:
        if has_holes and (hole := hole_at(fd, offset, size)):
            out.write(HEADER.pack(-hole))
            offset += hole
            continue
        length = min(CHUNK, data_at(fd, offset, size) if has_holes else size - offset)
        data = os.pread(fd, length, offset) or ZEROS[: size - offset]
        out.write(HEADER.pack(len(data)))
        out.write(data)
        offset += len(data)


def held_still(fd: int, before: os.stat_result) -> bool:
    """Return whether a file still has the status ``before``, and was last written more than 2 s
    ago.
    """
    after = os.fstat(fd)
    same = (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )
    return same and time.time() - max(before.st_mtime, before.st_ctime) > SETTLED_S


def send_file(out: BinaryIO, fd: int, have: int, size: int, sha256: str = "") -> None:
    """Send a file, of ``size`` bytes when it was listed, from byte ``have`` on.

    sha256: hash of the receiver's complete file, or "". If the file to send has the same hash, only
        ``SAME`` is sent, otherwise the complete file.
    """
    before = os.fstat(fd)
    beat = KeepAlive(out, HEADER.pack(ALIVE))
    if before.st_size < size or size < have:
        out.write(HEADER.pack(UNREADABLE))
        return
    if sha256 and hash_of(fd, size, beat).hexdigest() == sha256:
        out.write(HEADER.pack(SAME))
        return
    have = 0 if sha256 else have
    trailer = b""
    out.write(HEADER.pack(size - have))
    send_content(out, fd, have, size)
    # A log that only grew still begins with the bytes that were sent, so the receiver compares
    # hashes.
    if have or not held_still(fd, before):
        trailer = hash_of(fd, size, beat).digest()
    out.write(HEADER.pack(len(trailer)) + trailer)


def parse_request(line: bytes) -> tuple[int, int, int, str]:
    """Return INDEX, HAVE, SIZE and SHA256 (or "") of a request line. Raises ValueError if it is
    invalid.
    """
    index, have, size, sha256 = line.split()
    return int(index), int(have), int(size), "" if sha256 == b"-" else sha256.decode()


def send_requested_files(opener: FileOpener, paths: Sequence[bytes]) -> None:
    """Read requests from stdin and send the files. A request names a file by its index in
    ``paths``.
    """
    # Read all requests first, because the receiver does not read while it writes them.
    requests = []
    while line := sys.stdin.buffer.readline().rstrip(b"\n"):
        requests.append(parse_request(line))
    with open(1, "wb", buffering=BUFFER, closefd=False) as out:
        for index, have, size, sha256 in requests:
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
    """Return a line of the list of files. A ``payload`` of type bytes is encoded as base64."""
    if isinstance(payload, bytes):
        payload = base64.b64encode(payload).decode("ascii")
    name = binascii.b2a_base64(path, newline=False).decode("ascii")
    return f"{kind} {name} {mode} {mtime_ns} {size} {space} {payload}\n"


def line_of_status(
    path: bytes, status: os.stat_result, target: bytes | None = None, *, payload: str = ""
) -> str:
    """Return the list's line for a path. target: a link's target. payload: of a file. Pipes and
    devices get KIND left.
    """
    mode = stat.S_IMODE(status.st_mode)
    mtime_ns = status.st_mtime_ns
    if stat.S_ISREG(status.st_mode):
        size = status.st_size
        space = status.st_blocks * BLOCK
        return line_of("file", path, payload, mode=mode, mtime_ns=mtime_ns, size=size, space=space)
    kind = "folder" if stat.S_ISDIR(status.st_mode) else LEFT if target is None else "link"
    return line_of(kind, path, target or "", mode=mode, mtime_ns=mtime_ns)


def list_all(roots: list[bytes]) -> list[bytes]:
    """Print the list of all files and folders below ``roots``. Return their full paths, in the same
    order.
    """
    missing: list[str] = []
    for root in roots:
        try:
            os.stat(root)
        except (FileNotFoundError, NotADirectoryError):
            missing.append(os.fsdecode(root))
    if missing:
        sys.stderr.write(", ".join(map(repr, missing)))
        sys.exit(NOT_THERE)
    places = []
    for root in roots:
        real = os.path.realpath(root)
        pending = [(os.path.basename(os.path.abspath(root)), real)]
        while pending:
            path, full = pending.pop()
            status = os.stat(full, follow_symlinks=False)
            places.append(full)
            target = os.readlink(full) if stat.S_ISLNK(status.st_mode) else None
            sys.stdout.write(line_of_status(path, status, target))
            if stat.S_ISDIR(status.st_mode):
                names = sorted(entry.name for entry in os.scandir(full))
                pending += [
                    (path + b"/" + name, os.path.join(full, name)) for name in reversed(names)
                ]
    sys.stdout.write("\n")
    sys.stdout.flush()
    return places


def main(*roots: str) -> None:
    os.chdir(os.path.expanduser("~"))
    try:
        places = list_all([os.fsencode(root) for root in roots])
    except OSError as exc:
        fail(exc.filename or b"", exc)
    # Files of any owner are sent, because the user has named them.
    send_requested_files(FileOpener(b"/", any_owner=True), [place.lstrip(b"/") for place in places])
