"""Opens and reads files that a job can write. Runs on the cluster: standard library only, Python 3.9.

A job can make anything of the files in its folder: links to anywhere, pipes that are never written to,
devices, terabytes of zeros. So all of ours that reads there opens with ``open_file``: it never waits, follows
no link in place of the folder or below it, and takes regular files only, of the user whose folder it is, our
own, or root's.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CONTAINERS = 1 << 18  # of JSON: each takes much more memory than its two bytes of text


def open_folder(top: bytes, path: bytes = b"") -> int:
    """Open a folder below ``top`` without following a link there, or in its place; raises OSError."""
    fd = os.open(top, FOLDER)
    for name in path.split(b"/") if path else ():
        try:
            below = os.open(name, FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def open_file(top: bytes, path: bytes, *, any_owner: bool = False) -> int:
    """Open a regular file below ``top`` for reading; raises OSError for all else, and never waits."""
    above, _, name = path.rpartition(b"/")
    folder = open_folder(top, above)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    owners = (os.geteuid(), 0, os.stat(top).st_uid)
    if not any_owner and status.st_uid not in owners:
        os.close(fd)
        raise OSError(errno.EPERM, "another user's file", path)
    return fd


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
