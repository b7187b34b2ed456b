"""Acting with the rights of the account that a folder belongs to: root must follow no link of a job's."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ORDINARY = 1000  # from here on, user ids are those of people
SYSTEM = range(60514, 65536)  # but for these: Debian's own, systemd's, nobody


@contextmanager
def acting(uid: int, gid: int) -> Iterator[None]:
    """What is done meanwhile is done with an account's rights. The real user id stays root's."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    groups, own = os.getgroups(), os.getegid()
    os.setgroups(_groups(uid, gid))
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(own)
        os.setgroups(groups)


def _groups(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:  # the account is gone
        return [gid]


def is_persons(uid: int) -> bool:
    """Whether the number is one for the accounts of people."""
    return uid >= ORDINARY and uid not in SYSTEM


def person_above(path: str) -> os.stat_result | None:
    """The first folder on the way to a path that belongs to a person; links before it are root's."""
    for folder in reversed(Path(path).parents):
        try:
            found = folder.stat()
        except OSError:
            return None
        if is_persons(found.st_uid):
            return found
    return None


@contextmanager
def rights_for(path: str) -> Iterator[None]:
    """What is done meanwhile is done as the person whose folder the path lies in, as root elsewhere."""
    person = person_above(path)
    with acting(person.st_uid, person.st_gid) if person else acting(0, 0):
        yield


def read_regular(path: str, most: int | None = None, *, follow: bool = False) -> bytes:
    """The content of a regular file; raises OSError for all else, and never waits."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        data = file.read() if most is None else file.read(most + 1)
    if most is not None and len(data) > most:
        raise OSError(f"{path} is larger than {most} bytes")
    return data
