"""Files straight to their places. Runs on the cluster: standard library only, Python 3.9.

Argument: INTO, a folder, made if need be; relative ones begin at the home folder. The request and what
comes then: see receive.py. The last answer is {"folder": PATH, "wrong": [INDEX, ...]}: ``wrong`` did not have
the hash that was announced, and was not put in its place.
"""

from __future__ import annotations

import base64
import errno
import os
import stat

from clusterctl.transport.remote_receive import Entry, fail, read_entries, receive_all, tell


def make_folder(path: bytes) -> None:
    """A folder, or a link to one, stays what it is; our own can be written to until all is in it."""
    if not os.path.isdir(path):
        os.mkdir(path, 0o700)
        return
    status = os.stat(path)
    if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(path, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)


def make_link(target: bytes, path: bytes) -> None:
    if os.path.islink(path):
        if os.readlink(path) == target:
            return
        os.unlink(path)
    os.symlink(target, path)


def make_places(into: bytes, entries: list[Entry]) -> None:
    """Folders and links, before files come; folders get their mode and time when all is in them."""
    for entry in entries:
        path = os.path.join(into, entry.path)
        try:
            if entry.kind == "folder":
                make_folder(path)
            elif entry.kind == "link":
                make_link(base64.b64decode(entry.payload), path)
            elif os.path.isdir(path) and not os.path.islink(path):
                raise IsADirectoryError(errno.EISDIR, "a folder is where a file should go")
        except OSError as exc:
            fail(entry.path, exc)


def finish_folders(into: bytes, entries: list[Entry]) -> None:
    for entry in reversed(entries):
        if entry.kind == "folder":
            path = os.path.join(into, entry.path)
            os.chmod(path, entry.mode & 0o777)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def receive_below(into: bytes, entries: list[Entry]) -> list[int]:
    os.makedirs(into, exist_ok=True)
    make_places(into, entries)
    files = [entry for entry in entries if entry.kind == "file"]
    for entry in files:
        entry.final = os.path.join(into, entry.path)
        name = b".clusterctl-" + entry.payload[:32].encode() + b".part"
        entry.partial = os.path.join(os.path.dirname(entry.final), name)
    wrong = receive_all(entries, os.path.abspath(into), stored=False)
    for entry in files:
        if os.path.exists(entry.final):  # it may have been here already
            os.chmod(entry.final, entry.mode & 0o777)
            os.utime(entry.final, ns=(entry.mtime_ns, entry.mtime_ns))
    finish_folders(into, entries)
    return wrong


def main(into: str) -> None:
    os.chdir(os.path.expanduser("~"))
    wrong = receive_below(os.fsencode(into), read_entries())
    folder = base64.b64encode(os.path.realpath(os.fsencode(into))).decode("ascii")
    tell(folder=folder, wrong=wrong)
