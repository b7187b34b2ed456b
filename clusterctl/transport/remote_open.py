"""Safe opening and locking of files that a job can write. Runs on the cluster: standard library,
Python 3.9.

A job can create anything in its folder: links to any path, pipes that are never written to,
devices, terabytes of zeros. So clusterctl's programs read a job's folder with ``open_file`` only:
it never blocks, follows no link, and opens only regular files of the folder's owner, of this user,
or of root.

Jobs run as the user that owns clusterctl's files in the home, so a job may replace such a file by a
pipe or a link, or hold its lock. So ``open_own`` never blocks and follows no link, and ``lock`` has
a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import time
from typing import Any, BinaryIO

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# For the parent folders of a file, which this account may be unable to list. Linux only.
ON_THE_WAY = FOLDER | getattr(os, "O_PATH", 0)
# Most lists and objects in a JSON file, because each takes much more memory than its two bytes of
# text.
CONTAINERS = 1 << 18
# Mode of clusterctl's own files: only the owner may read and write them.
OWNERS = 0o600
HELD = 68  # exit status
RETRY_S = 0.1
ALIVE_S = 1.0


class KeepAlive:
    """Writer of keep-alives, to be called during long work. It writes ``sign`` at most once a
    second.
    """

    def __init__(self, out: BinaryIO | None, sign: bytes) -> None:
        self.out = out
        self.sign = sign
        self.due = time.monotonic() + ALIVE_S

    def __call__(self) -> None:
        if self.out is not None and time.monotonic() >= self.due:
            self.out.write(self.sign)
            self.out.flush()
            self.due = time.monotonic() + ALIVE_S


NO_BEAT = KeepAlive(None, b"")


def open_folder(top: bytes, path: bytes = b"") -> int:
    """Open ``top`` or a folder below it. Raises OSError, also if a part of the path is a link."""
    names = path.split(b"/") if path else []
    fd = os.open(top, ON_THE_WAY if names else FOLDER)
    for number, name in enumerate(names, 1):
        try:
            child = os.open(name, ON_THE_WAY if number < len(names) else FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = child
    return fd


def open_file(top: bytes, path: bytes, *, any_owner: bool = False) -> int:
    """Open a regular file below ``top`` to read it, without blocking. Raises OSError for anything
    else.
    """
    with contextlib.closing(FileOpener(top, any_owner=any_owner)) as opener:
        return opener.open(path)


class FileOpener:
    """Opens files like ``open_file``. Keeps the last folder open, as the next file is often in it
    too.
    """

    def __init__(self, top: bytes, *, any_owner: bool = False) -> None:
        self.top = top
        self.any_owner = any_owner
        self.entered = b""
        self.folder = -1
        self.owner = 0

    def enter(self, path: bytes) -> int:
        """Open the folder ``path`` below ``top``, unless it is open already. Return the
        descriptor.
        """
        if self.folder < 0 or path != self.entered:
            self.close()
            self.folder = open_folder(self.top, path)
            self.entered = path
            self.owner = os.stat(self.top).st_uid
        return self.folder

    def open(self, path: bytes) -> int:
        above, _, name = path.rpartition(b"/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=self.enter(above))
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        if not self.any_owner and status.st_uid not in {os.geteuid(), 0, self.owner}:
            os.close(fd)
            raise OSError(errno.EPERM, "the file belongs to another user", path)
        return fd

    def close(self) -> None:
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1


def fail(path: bytes, exc: OSError) -> None:
    sys.exit(f"{os.fsdecode(path)!r}: {exc.strerror or exc}")


def read_whole(top: bytes, path: bytes, most: int) -> bytes:
    """Return the content of a file; raise OSError if it is larger than ``most`` bytes or unsafe to
    open.
    """
    with os.fdopen(open_file(top, path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", path)
    return data


def read_json(top: bytes, path: bytes, most: int) -> Any:
    """Return the value in a JSON file of at most ``most`` bytes. Raises OSError or ValueError."""
    data = read_whole(top, path, most)
    if data.count(b"{") + data.count(b"[") > CONTAINERS:
        raise ValueError("too many lists and objects")
    try:
        return json.loads(data)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def remove(path: bytes) -> None:
    """Remove a file, a link, or a folder with its content. Content that can't be removed stays."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def remove_unless(kind: int, path: bytes) -> None:
    """Remove the file, link or folder at a path unless it is of ``kind``: ``S_IFREG`` or
    ``S_IFDIR``.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IFMT(os.lstat(path).st_mode) != kind:
            remove(path)


def open_own(path: bytes) -> int:
    """Open a regular file to read and write. Create it if missing; remove a link or folder of its
    name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, OWNERS)
    except FileExistsError:
        remove_unless(stat.S_IFREG, path)
        return os.open(path, flags, OWNERS)


def is_same_file(path: bytes, fd: int) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def lock(path: bytes, how: int, wait_s: float, beat: KeepAlive = NO_BEAT) -> int:
    """Open and lock a file. Return its descriptor. Exit with status ``HELD`` after ``wait_s``
    without lock.

    how: ``fcntl.LOCK_SH`` or ``LOCK_EX``. beat: called between tries, to send keep-alives.
    """
    deadline = time.monotonic() + wait_s
    while True:
        fd = open_own(path)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            if is_same_file(path, fd):
                # Other accounts could lock a file that they can read.
                os.fchmod(fd, OWNERS)
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                shown = os.fsdecode(os.path.abspath(path))
                sys.stderr.write(f"{shown!r} is still locked after {wait_s:g} s")
                sys.exit(HELD)
        os.close(fd)
        beat()
        time.sleep(RETRY_S)
