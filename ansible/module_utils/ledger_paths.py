"""Files, links and folders: what they are, putting them back, and which lines of a file are ours."""

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

from ansible.module_utils.user_rights import is_persons, person_above, read_regular, rights_for

ABSENT = {"kind": "absent"}
KEPT = ".clusterctl-kept"
DEEP = 2000  # characters of a path
_KEYS = "/.ssh/authorized_keys"  # each line stands by itself there, and lets somebody in
MOST_BYTES = 16 << 20  # of a file in a person's home

State = dict[str, Any]


def look(path: str, keep: Callable[[bytes], str] | None = None) -> State:
    """What is there now. ``keep`` takes a file's content, and returns its hash."""
    try:
        with rights_for(path):
            state, content = _look(path)
    except OSError:
        if not person_above(path):
            raise
        return {"kind": "other"}  # a job has closed it, or made it what is not read here
    if content is not None:
        state["content"] = keep(content) if keep else hashlib.sha256(content).hexdigest()
    return state


def _look(path: str) -> tuple[State, bytes | None]:
    """What is there, and the content of a file."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return dict(ABSENT), None
    state: State = {"uid": found.st_uid, "gid": found.st_gid}
    if stat.S_ISLNK(found.st_mode):
        return {**state, "kind": "link", "target": str(Path(path).readlink())}, None
    state["mode"] = stat.S_IMODE(found.st_mode)
    if attributes := _attributes(path):
        state["attributes"] = attributes
    if stat.S_ISDIR(found.st_mode):
        return {**state, "kind": "folder"}, None
    if not stat.S_ISREG(found.st_mode):
        return {**state, "kind": "other"}, None
    return {**state, "kind": "file"}, read(path)


def read(path: str) -> bytes:
    """The content of a regular file; of a person's with that person's rights, and of no great size."""
    with rights_for(path):
        return read_regular(path, MOST_BYTES if person_above(path) else None)


def remove(path: str) -> None:
    """Remove a file or a link, if there is one."""
    with rights_for(path):
        Path(path).unlink(missing_ok=True)


def changed_ns(path: str) -> int | None:
    """When a file's content was changed last, None where there is none."""
    try:
        with rights_for(path):
            return os.lstat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def put(path: str, state: State, content: bytes = b"", when_ns: int | None = None) -> None:
    """Have this there, changed last at ``when_ns``, whatever is there now.

    A file is replaced at once; a folder is only made.
    """
    with rights_for(path):
        _put(path, state, content, when_ns)


def _put(path: str, state: State, content: bytes, when_ns: int | None) -> None:
    if state["kind"] == "folder":
        Path(path).mkdir(parents=True, exist_ok=True)
        _dress(path, state)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fresh = f"{path}.clusterctl-new"
    _discard(fresh)
    if state["kind"] == "link":
        Path(fresh).symlink_to(state["target"])
        with _what_rights_allow():
            os.lchown(fresh, state["uid"], state["gid"])
    else:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        _dress(fresh, state)
    if when_ns is not None:
        os.utime(fresh, ns=(when_ns, when_ns), follow_symlinks=False)
    try:
        Path(fresh).replace(path)
    except OSError as exc:  # /etc/hosts of a container is a mount
        if exc.errno != errno.EBUSY:
            raise
        Path(path).write_bytes(content)
        _discard(fresh)


def beside(path: str, state: State, content: bytes) -> str:
    """Put somebody's version of a file beside its place; where."""
    for number in range(100):
        place = f"{path}{KEPT}" + (f".{number}" if number else "")
        with rights_for(path):
            if not os.path.lexists(place) or _read_or_none(place) == content:
                _put(place, state, content, None)
                return place
    raise OSError(errno.EEXIST, "a hundred versions of it lie beside it", path)


def _read_or_none(path: str) -> bytes | None:
    try:
        return read(path)
    except OSError:
        return None


def theirs(
    path: str, before: State, after: State, now: bytes, content: Callable[[str], bytes]
) -> bytes | None:
    """What somebody has made of a file, without our lines; None where that can't be told."""
    if after["kind"] != "file" or before["kind"] not in ("file", "absent"):
        return None
    if before["kind"] == "file":
        return without_ours(content(before["content"]), content(after["content"]), now)
    if not path.endswith(_KEYS):
        return None
    return without_ours(b"", content(after["content"]), now) or None


def without_ours(before: bytes, after: bytes, now: bytes) -> bytes | None:
    """``now`` without the lines that made ``after`` of ``before``; None where we did more than add lines."""
    old, new = before.splitlines(True), after.splitlines(True)
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    if any(tag not in ("equal", "insert") for tag, *_ in changes):
        return None
    lines = now.splitlines(True)
    for tag, _, _, start, end in changes:
        if tag == "insert":
            lines = _cut(lines, new[start:end])
    return b"".join(lines)


def remove_empty(path: str) -> bool:
    """Remove a folder if nothing is in it; whether it is gone."""
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
    """Remove a folder of ours, but for what belongs to people or is mounted there; what stayed."""
    if os.path.islink(path) or not Path(path).is_dir():  # noqa: PTH114
        _discard(path)
        return []
    left, emptied, stayed = [path], [], []
    while left:
        folder = left.pop()
        if os.path.ismount(folder):
            stayed.append(folder)
            continue
        emptied.append(folder)
        if len(folder) > DEEP:  # a job can nest folders until no path leads there
            subprocess.run(["rm", "-rf", "--one-file-system", "--", folder], check=True)
            continue
        for entry in sorted(os.scandir(folder), key=lambda one: one.name):
            if _of_people(entry.stat(follow_symlinks=False).st_uid):
                stayed.append(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                left.append(entry.path)
            else:
                Path(entry.path).unlink()
    _remove_empty(reversed(emptied))
    return sorted(stayed)


def _remove_empty(folders: Iterable[str]) -> None:
    """Remove these, but for those that are gone already or still hold something."""
    for folder in folders:
        try:
            Path(folder).rmdir()
        except OSError as exc:
            if exc.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                raise


def _of_people(uid: int) -> bool:
    """Whether it is the number of a person's account. Those of accounts that are gone are nobody's."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return is_persons(uid)


def _cut(lines: list[bytes], block: list[bytes]) -> list[bytes]:
    """The lines without the block; where it is broken up, without each of its lines, once."""
    size = len(block)
    for start in range(len(lines) - size + 1):
        if lines[start : start + size] == block:
            return lines[:start] + lines[start + size :]
    left = list(lines)
    for line in block:
        if line in left and line.strip():
            left.remove(line)
    return left


def _dress(path: str, state: State) -> None:
    """Owner before mode: a change of owner drops the set-id bits. Then the access list, which has a mode."""
    with _what_rights_allow():
        os.chown(path, state["uid"], state["gid"])
    Path(path).chmod(state["mode"])
    now = _attributes(path)
    for name, value in state.get("attributes", {}).items():
        if now.get(name) != value:
            with _what_rights_allow():
                os.setxattr(path, name, bytes.fromhex(value))


@contextmanager
def _what_rights_allow() -> Iterator[None]:
    """In a home, a file of root's becomes its account's when it is put back, and has no capabilities."""
    try:
        yield
    except PermissionError:
        if os.geteuid() == 0:
            raise


def _attributes(path: str) -> dict[str, str]:
    """What is beside owner and mode, in hexadecimal: SELinux's context, an access list, capabilities."""
    try:
        return {name: os.getxattr(path, name).hex() for name in os.listxattr(path)}
    except OSError:
        return {}


def _discard(path: str) -> None:
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        Path(path).unlink()
