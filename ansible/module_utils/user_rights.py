"""File access with the rights of a folder's owner, because root must not follow links that a job
created.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Uids from here on belong to people, except the range of Debian, systemd and `nobody`.
ORDINARY = 1000
SYSTEM = range(60514, 65536)


@contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Run the body with the rights of an account. The real uid stays root's."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    groups = os.getgroups()
    effective_gid = os.getegid()
    os.setgroups(_groups(uid, gid))
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(effective_gid)
        os.setgroups(groups)


def _groups(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        # The account was removed.
        return [gid]


def is_person_uid(uid: int) -> bool:
    """Return whether a uid is in the range of people's accounts, not of system accounts."""
    return uid >= ORDINARY and uid not in SYSTEM


def owner_above(path: str) -> os.stat_result | None:
    """Return the status of the first folder above ``path``, from the root, that belongs to a
    person, if any.

    Links above this folder belong to root.
    """
    for folder in reversed(Path(path).parents):
        try:
            status = folder.stat()
        except OSError:
            return None
        if is_person_uid(status.st_uid):
            return status
    return None


@contextmanager
def rights_for(path: str) -> Iterator[None]:
    """Run the body with the rights of the owner of the home that contains the path; elsewhere, as
    root.
    """
    person = owner_above(path)
    with acting_as(person.st_uid, person.st_gid) if person else acting_as(0, 0):
        yield


def read_regular(path: str, most: int | None = None) -> bytes:
    """Return the content of a regular file, without blocking. Raise OSError for anything else.

    most: size limit in bytes, above which OSError is raised. Default: no limit.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        data = file.read() if most is None else file.read(most + 1)
    if most is not None and len(data) > most:
        raise OSError(f"{path} is larger than {most} bytes")
    return data
