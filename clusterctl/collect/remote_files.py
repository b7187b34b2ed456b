"""Runs on the cluster: lists a job's folder, or sends files of it. Standard library only, Python 3.9.

    python3 -c THIS_FILE list FOLDER
    python3 -c THIS_FILE send FOLDER    with JSON arrays [NAME, SIZE, SHA256] and an empty line on stdin

Names are relative and base64, since they may be any bytes. ``list`` answers with a JSON object a line: a file
with its size, or something that is left where it is, with the reason. What source.json says was sent with
the job, is large and is still the same, is left too; and where there is an outputs.json, what its expressions
do not take. ``send`` answers, for each file in turn, eight bytes with its size and as many bytes of it as
were asked for, then a byte, 1 if it held still meanwhile, and the 32 bytes of its sha256. In place of the
size stands -1 if it can't be read or is shorter by now, or -2 if its sha256 is the one that was named: then
nothing follows. Links are never followed.
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
import time
from re import Pattern
from typing import Any, BinaryIO

CHECKPOINTS = re.compile(rb"(checkpoint|ckpt)", re.IGNORECASE)
TASK = re.compile(rb"task-[0-9]+")
CHUNK = 1 << 20
HEADER = struct.Struct(">q")
UNREADABLE, SAME = -1, -2
SETTLED_S = 2.0
LARGE = 1 << 20
UNCHANGED = "unchanged since it was submitted"
UNWANTED = "not among the outputs"
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


Given = dict[
    bytes, tuple[int, str]
]  # what the job was given: path -> size and sha256, or 0 and a link's target


def read_given(folder: bytes) -> Given:
    try:
        with open(os.path.join(folder, b"source.json"), "rb") as file:  # noqa: PTH118, PTH123
            source = json.load(file)
        given = {os.fsencode(one["path"]): (int(one["size"]), str(one["sha256"])) for one in source["files"]}
        given.update({os.fsencode(one["path"]): (0, str(one["target"])) for one in source["links"]})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # a job may write what it likes
        return {}
    return given


def read_rules(folder: bytes) -> list[tuple[bool, Pattern[str]]] | None:
    """What outputs.json says is brought home; None: all but checkpoints."""
    try:
        with open(os.path.join(folder, b"outputs.json"), "rb") as file:  # noqa: PTH118, PTH123
            rules = json.load(file)["rules"]
        return [(bool(takes), re.compile(expression)) for takes, expression in rules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, re.error):
        return None


class Listing:
    """Tells what of a job's folder is to be fetched, and what is left there."""

    def __init__(self, top: bytes) -> None:
        self.top = top
        self.given = read_given(top)
        self.rules = read_rules(top)

    def folder(self, below: bytes) -> bool | None:
        """List a folder. Returns whether it holds something to be fetched; None if it holds nothing.

        Where it holds only what is not wanted, that is left to the caller to say, once for all of it.
        """
        try:
            with os.scandir(os.path.join(self.top, below)) as found:  # noqa: PTH118  # names are bytes
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as exc:
            tell(below or b".", skip=exc.strerror or str(exc))
            return True
        unwanted: list[bytes] = []
        something = False
        for entry in entries:
            path = os.path.join(below, entry.name)  # noqa: PTH118
            wanted = self.entry(path, entry.is_dir(follow_symlinks=False))
            if wanted is False:
                unwanted.append(path)
            something = something or bool(wanted)
        if something or not below:
            for path in unwanted:
                tell(path, skip=UNWANTED)
        return something or (False if unwanted else None)

    def entry(self, path: bytes, is_folder: bool) -> bool | None:
        """Whether something of it is to be fetched; None if nothing needs to be said of it."""
        if is_folder:
            if self.rules is None and CHECKPOINTS.match(os.path.basename(path)):  # noqa: PTH119
                tell(path, skip="checkpoints stay on the cluster")
                return True
            return self.folder(path)
        full = os.path.join(self.top, path)  # noqa: PTH118
        if is_link_of_a_task(path, full):
            return None
        if self.rules is not None and not self.is_output(self.rules, path):
            return None if path in self.given else False
        list_file(path, full, self.given)
        return True

    @staticmethod
    def is_output(rules: list[tuple[bool, Pattern[str]]], path: bytes) -> bool:
        """Whether it is wanted by its path in the job's folder, or in that of a task of an array."""
        top, _, rest = path.partition(b"/")
        names = [path, rest] if rest and TASK.fullmatch(top) else [path]
        for name in map(os.fsdecode, names):
            said = [takes for takes, expression in rules if expression.match(name)]
            if said and said[-1]:
                return True
        return False


def is_link_of_a_task(path: bytes, full: bytes) -> bool:
    """Whether it is one of the links by which a task of an array sees what the job was given."""
    folder, name = os.path.split(path)
    in_task = TASK.fullmatch(folder) and os.path.islink(full)  # noqa: PTH114
    return bool(in_task) and os.readlink(full) == b"../" + name  # noqa: PTH115


def list_file(path: bytes, full: bytes, given: Given) -> None:
    try:
        mode = os.lstat(full).st_mode
        for is_kind, kind in KINDS:
            if is_kind(mode):
                same = stat.S_ISLNK(mode) and given.get(path) == (0, os.fsdecode(os.readlink(full)))  # noqa: PTH115
                tell(path, skip=UNCHANGED if same else kind)
                return
        fd = open_file(full)
    except OSError as exc:
        tell(path, skip=exc.strerror or str(exc))
        return
    size = os.fstat(fd).st_size
    known = given.get(path, (0, ""))
    same = size > LARGE and known[0] == size and hash_of(fd, size).hexdigest() == known[1]
    os.close(fd)
    if same:
        tell(path, skip=UNCHANGED)
    else:
        tell(path, size=size)


def hash_of(fd: int, size: int) -> Any:
    """The hash of a file's first bytes."""
    sha = hashlib.sha256()
    os.lseek(fd, 0, os.SEEK_SET)
    while size and (data := os.read(fd, min(CHUNK, size))):
        sha.update(data)
        size -= len(data)
    return sha


def held_still(fd: int, before: os.stat_result, size: int, digest: bytes) -> bool:
    """Whether what was read is what the file held at one moment: a log that only grew meanwhile did that.

    A file that was written just before, within the resolution of its times, is read again to be sure.
    """
    after = os.fstat(fd)
    same = (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )
    settled = time.time() - max(before.st_mtime, before.st_ctime) > SETTLED_S
    return (same and settled) or hash_of(fd, size).digest() == digest


def send_file(out: BinaryIO, path: bytes, size: int, sha256: str) -> None:
    try:
        fd = open_file(path)
    except OSError:
        out.write(HEADER.pack(UNREADABLE))
        return
    try:
        before = os.fstat(fd)
        if before.st_size < size:
            out.write(HEADER.pack(UNREADABLE))
            return
        if sha256 and hash_of(fd, size).hexdigest() == sha256:
            out.write(HEADER.pack(SAME))
            return
        os.lseek(fd, 0, os.SEEK_SET)
        out.write(HEADER.pack(size))
        sha, left = hashlib.sha256(), size
        while left:
            # A file that became shorter is filled up, and did not hold still.
            data = os.read(fd, min(CHUNK, left)) or bytes(min(CHUNK, left))
            sha.update(data)
            out.write(data)
            left -= len(data)
        out.write(b"\1" if held_still(fd, before, size, sha.digest()) else b"\0")
        out.write(sha.digest())
    finally:
        os.close(fd)


def send(folder: bytes) -> None:
    wanted = []
    while (line := sys.stdin.readline()) not in {"", "\n"}:
        wanted.append(json.loads(line))
    with open(1, "wb", buffering=CHUNK, closefd=False) as out:
        for name, size, sha256 in wanted:
            send_file(out, os.path.join(folder, base64.b64decode(name)), size, sha256)  # noqa: PTH118


if sys.argv[1] == "list":
    Listing(os.fsencode(sys.argv[2])).folder(b"")
else:
    send(os.fsencode(sys.argv[2]))
