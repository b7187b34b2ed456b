"""The state of files, links and folders: reading, restoring, and removing lines that clusterctl
added.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.module_utils.snapshot_mounts import LOST
from ansible.module_utils.user_rights import is_person_uid, owner_above, read_regular, rights_for

ABSENT = {"kind": "absent"}
KEPT = ".clusterctl-kept"
# The length of a path from which folders are removed by `rm`, in characters.
DEEP = 2000
# Each line of this file is independent and lets a person log in.
_KEYS = "/.ssh/authorized_keys"
# The largest file that is read in a person's home.
MOST_BYTES = 16 << 20

State = dict[str, Any]


def read_state(path: str, keep: Callable[[bytes], str] | None = None) -> State:
    """Return the state of a path: its kind, owner, mode, hash of the content, and target of the
    link.

    keep: called with the content of a file; stores it and returns its hash. Default: only hash the
        content.
    """
    try:
        with rights_for(path):
            state, content = _read_state(path)
    except OSError as exc:
        if not owner_above(path) or exc.errno in LOST:
            raise
        # A job has made the path unreadable, or a file that is not regular.
        return {"kind": "other"}
    if content is not None:
        state["content"] = keep(content) if keep else hashlib.sha256(content).hexdigest()
    return state


def _read_state(path: str) -> tuple[State, bytes | None]:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return dict(ABSENT), None
    state: State = {"uid": status.st_uid, "gid": status.st_gid}
    if stat.S_ISLNK(status.st_mode):
        return {**state, "kind": "link", "target": str(Path(path).readlink())}, None
    state["mode"] = stat.S_IMODE(status.st_mode)
    if attributes := _attributes(path):
        state["attributes"] = attributes
    if stat.S_ISDIR(status.st_mode):
        return {**state, "kind": "folder"}, None
    if not stat.S_ISREG(status.st_mode):
        return {**state, "kind": "other"}, None
    return {**state, "kind": "file"}, read(path)


def read(path: str) -> bytes:
    """Return the content of a regular file. In a home, use its owner's rights and a limit of the
    size.
    """
    with rights_for(path):
        return read_regular(path, MOST_BYTES if owner_above(path) else None)


def remove(path: str) -> None:
    """Remove a file or a link, if it exists."""
    with rights_for(path):
        Path(path).unlink(missing_ok=True)


def changed_ns(path: str) -> int | None:
    """Return the mtime of a path in nanoseconds; None if it does not exist."""
    try:
        with rights_for(path):
            return os.lstat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_state(path: str, state: State, content: bytes = b"", when_ns: int | None = None) -> None:
    """Give a path this state. A file is replaced atomically. A folder is created without its
    content.

    when_ns: new mtime in nanoseconds. Default: now.
    """
    with rights_for(path):
        _write_state(path, state, content, when_ns)


def _write_state(path: str, state: State, content: bytes, when_ns: int | None) -> None:
    if state["kind"] == "folder":
        Path(path).mkdir(parents=True, exist_ok=True)
        _apply_metadata(path, state)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fresh = f"{path}.clusterctl-new"
    _discard(fresh)
    if state["kind"] == "link":
        Path(fresh).symlink_to(state["target"])
        with _ignore_denied():
            os.lchown(fresh, state["uid"], state["gid"])
    else:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        _apply_metadata(fresh, state)
    if when_ns is not None:
        os.utime(fresh, ns=(when_ns, when_ns), follow_symlinks=False)
    try:
        Path(fresh).replace(path)
    except OSError as exc:
        # /etc/hosts of a container is a mount point and can't be replaced.
        if exc.errno != errno.EBUSY:
            raise
        Path(path).write_bytes(content)
        _discard(fresh)


def save_beside(path: str, state: State, content: bytes) -> str:
    """Save a version of a file in the same folder as ``path``, and return the new file's path."""
    for number in range(100):
        place = f"{path}{KEPT}" + (f".{number}" if number else "")
        with rights_for(path):
            if not os.path.lexists(place) or _read_or_none(place) == content:
                _write_state(place, state, content, None)
                return place
    raise OSError(errno.EEXIST, "a hundred saved versions already exist beside the file", path)


def _read_or_none(path: str) -> bytes | None:
    try:
        return read(path)
    except OSError:
        return None


def owner_version(
    path: str, before: State, after: State, now: bytes, content: Callable[[str], bytes]
) -> bytes | None:
    """Return a changed file's content without the lines that clusterctl added; None if that is
    impossible.

    before, after: states before and after clusterctl's change. now: present content. content: gets
        a hash.
    """
    if after["kind"] != "file" or before["kind"] not in ("file", "absent"):
        return None
    if before["kind"] == "file":
        return remove_added_lines(content(before["content"]), content(after["content"]), now)
    if not path.endswith(_KEYS):
        return None
    return remove_added_lines(b"", content(after["content"]), now) or None


def remove_added_lines(before: bytes, after: bytes, now: bytes) -> bytes | None:
    """Return ``now`` without the lines that ``after`` has and ``before`` lacks; None: lines were
    changed.
    """
    old = before.splitlines(True)
    new = after.splitlines(True)
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    if any(tag not in ("equal", "insert") for tag, *_ in changes):
        return None
    lines = now.splitlines(True)
    for tag, _, _, start, end in changes:
        if tag == "insert":
            lines = _remove_block(lines, new[start:end])
    return b"".join(lines)


def remove_empty(path: str) -> bool:
    """Remove a folder if it is empty, and return whether it is gone."""
    try:
        with rights_for(path):
            Path(path).rmdir()
    except FileNotFoundError:
        return True
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.ENOTDIR):
            raise
        return False
    return True


def remove_tree(path: str) -> list[str]:
    """Remove a folder. Keep files of people and mount points in it, and return their paths."""
    if os.path.islink(path) or not Path(path).is_dir():
        _discard(path)
        return []
    folders = [path]
    emptied = []
    remaining = []
    while folders:
        folder = folders.pop()
        if os.path.ismount(folder):
            remaining.append(folder)
            continue
        emptied.append(folder)
        # A job can nest folders until their path is too long for system calls.
        if len(folder) > DEEP:
            subprocess.run(["rm", "-rf", "--one-file-system", "--", folder], check=True)
            continue
        for entry in sorted(os.scandir(folder), key=lambda item: item.name):
            if _is_person(entry.stat(follow_symlinks=False).st_uid):
                remaining.append(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                Path(entry.path).unlink()
    _remove_empty(reversed(emptied))
    return sorted(remaining)


def _remove_empty(folders: Iterable[str]) -> None:
    for folder in folders:
        try:
            Path(folder).rmdir()
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                raise


def _is_person(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return is_person_uid(uid)


def _remove_block(lines: list[bytes], block: list[bytes]) -> list[bytes]:
    """Return the lines without a block of lines. If the block has no markers BEGIN and END and its
    lines are not together, remove each line of it once.
    """
    size = len(block)
    # Lines between markers are the cluster's, whatever they are; without markers, no line is.
    if block[0].startswith(b"# BEGIN") and block[-1].startswith(b"# END"):
        if block[0] not in lines or block[-1] not in lines[lines.index(block[0]) :]:
            return lines
        start = lines.index(block[0])
        return lines[:start] + lines[lines.index(block[-1], start) + 1 :]
    for start in range(len(lines) - size + 1):
        if lines[start : start + size] == block:
            return lines[:start] + lines[start + size :]
    left = list(lines)
    for line in block:
        if line in left and line.strip():
            left.remove(line)
    return left


def _apply_metadata(path: str, state: State) -> None:
    # In this order: chown drops the set-id bits of the mode, and an access list includes the mode.
    with _ignore_denied():
        os.chown(path, state["uid"], state["gid"])
    Path(path).chmod(state["mode"])
    now = _attributes(path)
    for name, value in state.get("attributes", {}).items():
        if now.get(name) != value:
            with _ignore_denied():
                os.setxattr(path, name, bytes.fromhex(value))


@contextmanager
def _ignore_denied() -> Iterator[None]:
    # In a home, a restored file of root then belongs to the home's owner.
    try:
        yield
    except PermissionError:
        if os.geteuid() == 0:
            raise


def _attributes(path: str) -> dict[str, str]:
    """Return the extended attributes, name -> value in hex: SELinux label, access list,
    capabilities.
    """
    try:
        return {name: os.getxattr(path, name).hex() for name in os.listxattr(path)}
    except OSError:
        return {}


def _discard(path: str) -> None:
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        Path(path).unlink()
