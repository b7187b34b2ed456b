"""Sent to hosts with the programs that run there as root: acting as an account, reading what accounts own.

For Python 3.6, and the standard library alone.
"""

import errno
import os
import pwd
import stat
from contextlib import contextmanager
from typing import Iterator

MOST_BYTES = 16 << 20  # of a file that is read whole


@contextmanager
def acting(account: pwd.struct_passwd) -> Iterator[None]:
    """What is done meanwhile is done with an account's rights: root must follow no link of a job's."""
    if os.geteuid() != 0 or account.pw_uid == 0:
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def read_regular(path: str) -> bytes:
    """The content of a regular file of no great size; raises OSError for all else, and never waits."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        data = file.read(MOST_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    if data is None or len(data) > MOST_BYTES:
        raise OSError(errno.EINVAL, "not a regular file of that size", path)
    return data
