"""Sends files and folders home. Runs on the cluster: standard library only, Python 3.9.

Arguments: what is wanted; relative paths begin at the home folder. The answer is a JSON array a line, [KIND,
PATH, MODE, MTIME_NS, SIZE, SPACE, TARGET], and an empty line. KIND is folder, file, link, or other, which
does not travel; PATH begins with the name of what was asked for; SPACE is what it takes on a disk. Paths and
targets are base64, since they may be any bytes.

stdin then brings a JSON array a line, [INDEX, HAVE, SHA256], and an empty line: the files that are wanted,
how many bytes of each are there already, or the hash of what is. For each in turn come eight bytes with the
number of bytes that follow, these (see ``send_content``), and a last piece with the 32 bytes of the whole
file's sha256; or -1 if it can't be read or is shorter by now, or -2 if it has that hash; -3 is a sign of
life. If something asked for is not there, the exit status is 67.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import sys
from typing import Any

from clusterctl.transport.remote_open import open_file
from clusterctl.transport.remote_receive import fail
from clusterctl.transport.remote_send import BLOCK, CHUNK, HEADER, Beat, hash_of, send_alive, send_content

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
