"""Hashes and sends the content of files. Runs on the cluster: standard library only, Python 3.9."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from clusterctl.transport.remote_open import fail, open_file

CHUNK = 1 << 20
ZEROS = bytes(CHUNK)
HEADER = struct.Struct(">q")
BLOCK = 512  # bytes of st_blocks
ALIVE_S = 1.0


class Beat:
    """Calls ``say`` when about a second went by since the last time, as a sign of life in long work."""

    def __init__(self, say: Callable[[], object]) -> None:
        self.say, self.due = say, time.monotonic() + ALIVE_S

    def __call__(self) -> None:
        if time.monotonic() >= self.due:
            self.say()
            self.due = time.monotonic() + ALIVE_S


def hash_of(fd: int, size: int, beat: Callable[[], object] = lambda: None) -> Any:
    """The hash of a file's first bytes, or of all if it is shorter."""
    sha, at, size = hashlib.sha256(), 0, min(size, os.fstat(fd).st_size)
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


def send_content(out: BinaryIO, fd: int, at: int, size: int, sha: Any) -> None:
    """Send a file from ``at`` to ``size``, and hash it.

    It goes in pieces: eight bytes with the length of the piece and the piece, or a negative length, of a hole
    that is not sent. A length of 0 is a sign of life. What became shorter meanwhile is filled with zeros.
    """
    beat = Beat(lambda: send_alive(out))
    while at < size:
        hole = hole_at(fd, at, size)
        if hole:
            out.write(HEADER.pack(-hole))
            for done in range(0, hole, CHUNK):
                sha.update(ZEROS[: hole - done])
                beat()
            at += hole
            continue
        data = os.pread(fd, min(CHUNK, size - at), at) or ZEROS[: size - at]
        out.write(HEADER.pack(len(data)))
        out.write(data)
        sha.update(data)
        at += len(data)


def send_alive(out: BinaryIO, sign: int = 0) -> None:
    out.write(HEADER.pack(sign))
    out.flush()


UNREADABLE, SAME, ALIVE = -1, -2, -3
NOT_THERE = 67


def row(path: bytes, status: os.stat_result, full: bytes) -> tuple[str, list[Any]]:
    mode, target = status.st_mode, b""
    kind = "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"
    if stat.S_ISLNK(mode):
        kind, target = "link", os.readlink(full)
    name, text = base64.b64encode(path).decode("ascii"), base64.b64encode(target).decode("ascii")
    size, space = (status.st_size, status.st_blocks * BLOCK) if kind == "file" else (0, 0)
    return kind, [kind, name, stat.S_IMODE(mode), status.st_mtime_ns, size, space, text]


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
            kind, line = row(path, os.stat(full, follow_symlinks=False), full)
            places.append(full)
            sys.stdout.write(json.dumps(line) + "\n")
            if kind == "folder":
                names = sorted(entry.name for entry in os.scandir(full))
                left += [(path + b"/" + name, os.path.join(full, name)) for name in reversed(names)]
    sys.stdout.write("\n")
    sys.stdout.flush()
    return places


def send(out: Any, place: bytes, have: int, sha256: str) -> None:
    try:
        fd = open_file(*os.path.split(place), any_owner=True)  # the user has named it
    except OSError:
        out.write(HEADER.pack(UNREADABLE))
        return
    try:
        size = os.fstat(fd).st_size
        if size < have:
            out.write(HEADER.pack(UNREADABLE))
            return
        sha = hash_of(fd, size if sha256 else have, Beat(lambda: send_alive(out, ALIVE)))
        if sha256 and sha.hexdigest() == sha256:
            out.write(HEADER.pack(SAME))
            return
        if sha256:
            sha, have = hashlib.sha256(), 0
        out.write(HEADER.pack(size - have))
        send_content(out, fd, have, size, sha)
        out.write(HEADER.pack(sha.digest_size) + sha.digest())
    finally:
        os.close(fd)


def main(*roots: str) -> None:
    os.chdir(os.path.expanduser("~"))
    try:
        places = list_all([os.fsencode(root) for root in roots])
    except OSError as exc:
        fail(exc.filename or b"", exc)
    wanted = []
    while (line := sys.stdin.buffer.readline()) not in {b"", b"\n"}:
        wanted.append(json.loads(line))
    with open(1, "wb", buffering=CHUNK, closefd=False) as out:
        for index, have, sha256 in wanted:
            send(out, places[index], have, sha256)
