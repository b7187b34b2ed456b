"""Runs on the cluster: lists a job's folder, or sends files of it. Standard library only, Python 3.9.

    python3 -c THIS_FILE list FOLDER
    python3 -c THIS_FILE send FOLDER [[NAME, SIZE], ...]

Names are relative and base64, since they may be any bytes. ``list`` answers with a JSON object a line: a file
with its size, time and sha256, or something that is left where it is, with the reason. ``send`` answers, for
each file in turn, eight bytes with its size (-1: it can't be read) and as many bytes of it as were asked for.
Links are never followed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import struct
import sys

CHECKPOINTS = re.compile(rb"(checkpoint|ckpt)", re.IGNORECASE)
CHUNK = 1 << 20
KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def tell(path: bytes, **fields: object) -> None:
    name = base64.b64encode(path).decode("ascii")
    sys.stdout.write(json.dumps({"path": name, **fields}) + "\n")


def open_file(path: bytes) -> int:
    """Open a regular file without following a link or waiting on a pipe; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd


def list_folder(folder: bytes, below: bytes) -> None:
    try:
        with os.scandir(os.path.join(folder, below)) as found:  # noqa: PTH118  # names are bytes
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as exc:
        tell(below or b".", skip=exc.strerror or str(exc))
        return
    for entry in entries:
        path = os.path.join(below, entry.name)  # noqa: PTH118
        if entry.is_dir(follow_symlinks=False):
            if CHECKPOINTS.match(entry.name):
                tell(path, skip="checkpoints stay on the cluster")
            else:
                list_folder(folder, path)
        else:
            list_file(folder, path)


def list_file(folder: bytes, path: bytes) -> None:
    full = os.path.join(folder, path)  # noqa: PTH118
    try:
        mode = os.lstat(full).st_mode
        for is_kind, kind in KINDS:
            if is_kind(mode):
                tell(path, skip=kind)
                return
        fd = open_file(full)
    except OSError as exc:
        tell(path, skip=exc.strerror or str(exc))
        return
    with os.fdopen(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        sha, left = hashlib.sha256(), status.st_size
        # A file that grows meanwhile is taken as long as it was.
        while left and (data := file.read(min(CHUNK, left))):
            sha.update(data)
            left -= len(data)
    tell(path, size=status.st_size - left, mtime=int(status.st_mtime), sha256=sha.hexdigest())


def send(folder: bytes, wanted: list[tuple[str, int]]) -> None:
    out = sys.stdout.buffer
    for name, size in wanted:
        try:
            fd = open_file(os.path.join(folder, base64.b64decode(name)))  # noqa: PTH118
        except OSError:
            out.write(struct.pack(">q", -1))
            continue
        out.write(struct.pack(">q", size))
        with os.fdopen(fd, "rb", buffering=0) as file:
            left = size
            while left:
                # A file that became shorter is filled up; its hash will tell.
                data = file.read(min(CHUNK, left)) or bytes(min(CHUNK, left))
                out.write(data)
                left -= len(data)
    out.flush()


if sys.argv[1] == "list":
    list_folder(os.fsencode(sys.argv[2]), b"")
else:
    send(os.fsencode(sys.argv[2]), json.loads(sys.argv[3]))
