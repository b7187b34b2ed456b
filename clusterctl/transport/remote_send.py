"""Hashes and sends the content of files. Runs on the cluster: standard library only, Python 3.9."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import time
from collections.abc import Callable
from typing import Any, BinaryIO

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
