"""Opens and locks files that a job can write. Runs on the cluster: standard library only, Python 3.9.

A job can make anything of the files in its folder: links to anywhere, pipes that are never written to,
devices, terabytes of zeros. So all of ours that reads there opens with ``open_file``: it never waits,
follows no link in place of the folder or below it, and takes regular files only, of the user whose folder it
is, our own, or root's.

Jobs run as the same user as our own files in a home: any of them may replace such a file by a pipe or a
link, or hold the lock on it. So opening one never waits and follows no link (``open_own``), and a lock is
waited for until a deadline.
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
# A folder on the way to another one, which this account need not be allowed to list. Linux only.
ON_THE_WAY = FOLDER | getattr(os, "O_PATH", 0)
CONTAINERS = 1 << 18  # of JSON: each takes much more memory than its two bytes of text
OWNERS = 0o600  # the mode of a file that others of ours may open to write
HELD = 68  # the exit status of a program that gave up waiting for a lock
RETRY_S = 0.1
ALIVE_S = 1.0


class Beat:
    """Writes a sign of life if about a second went by since the last one; for long work."""

    def __init__(self, out: BinaryIO | None, sign: bytes) -> None:
        self.out, self.sign, self.due = out, sign, time.monotonic() + ALIVE_S

    def __call__(self) -> None:
        if self.out is not None and time.monotonic() >= self.due:
            self.out.write(self.sign)
            self.out.flush()
            self.due = time.monotonic() + ALIVE_S


SILENT = Beat(None, b"")


def open_folder(top: bytes, path: bytes = b"") -> int:
    """Open a folder below ``top`` without following a link there, or in its place; raises OSError."""
    names = path.split(b"/") if path else []
    fd = os.open(top, ON_THE_WAY if names else FOLDER)
    for number, name in enumerate(names, 1):
        try:
            below = os.open(name, ON_THE_WAY if number < len(names) else FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def open_file(top: bytes, path: bytes, *, any_owner: bool = False) -> int:
    """Open a regular file below ``top`` for reading; raises OSError for all else, and never waits."""
    with contextlib.closing(Opener(top, any_owner=any_owner)) as opener:
        return opener.open(path)


class Opener:
    """Opens files below ``top`` as ``open_file`` says; the folder of the last one stays open for the next."""

    def __init__(self, top: bytes, *, any_owner: bool = False) -> None:
        self.top, self.any_owner = top, any_owner
        self.entered, self.folder, self.owner = b"", -1, 0

    def enter(self, path: bytes) -> int:
        """The open folder of this path."""
        if self.folder < 0 or path != self.entered:
            self.close()
            self.entered, self.folder = path, open_folder(self.top, path)
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
            raise OSError(errno.EPERM, "another user's file", path)
        return fd

    def close(self) -> None:
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1


def fail(path: bytes, exc: OSError) -> None:
    sys.exit(f"{os.fsdecode(path)!r}: {exc.strerror or exc}")


def read_whole(top: bytes, path: bytes, most: int) -> bytes:
    """The content of a file of at most so many bytes; raises OSError."""
    with os.fdopen(open_file(top, path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", path)
    return data


def read_json(top: bytes, path: bytes, most: int) -> Any:
    """What a file of JSON says; raises OSError or ValueError."""
    data = read_whole(top, path, most)
    if data.count(b"{") + data.count(b"[") > CONTAINERS:
        raise ValueError("too much in it")
    try:
        return json.loads(data)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def remove(path: bytes) -> None:
    """Remove a file, link or folder with all in it; of a folder, what can't be removed stays."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def remove_unless(kind: int, path: bytes) -> None:
    """Remove what is in the place of a file (``stat.S_IFREG``) or a folder (``S_IFDIR``) and is none."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IFMT(os.lstat(path).st_mode) != kind:
            remove(path)


def open_own(path: bytes) -> int:
    """Open a regular file to read and write; made if need be, also in the place of what is none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, OWNERS)
    except FileExistsError:
        remove_unless(stat.S_IFREG, path)
        return os.open(path, flags, OWNERS)


def lies_at(path: bytes, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def lock(path: bytes, how: int, wait_s: float, beat: Beat = SILENT) -> int:
    """Open the file and lock it (``fcntl.LOCK_SH`` or ``LOCK_EX``); ``beat`` is a sign of life meanwhile.

    After ``wait_s`` the program exits.
    """
    deadline = time.monotonic() + wait_s
    while True:
        fd = open_own(path)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            if lies_at(path, fd):
                os.fchmod(fd, OWNERS)  # other accounts could hold what they can read
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                shown = os.fsdecode(os.path.abspath(path))
                sys.stderr.write(f"{shown!r} is still locked after {wait_s:g} s")
                sys.exit(HELD)
        os.close(fd)
        beat()
        time.sleep(RETRY_S)
