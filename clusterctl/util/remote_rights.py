"""Acting with an account's rights and reading an account's files, for programs that run as root on
hosts.

For Python 3.6 and its standard library.
"""

import errno
import os
import pwd
import stat
from contextlib import contextmanager
from typing import Iterator

MOST_BYTES = 16 << 20  # of a file
# The kernel refuses to read files of /proc/sys into a buffer of several MiB.
_CHUNK_BYTES = 1 << 16


@contextmanager
def acting_as(account: pwd.struct_passwd) -> Iterator[None]:
    """Run the body with an account's rights, because root must not follow links that a job has
    created.
    """
    if os.geteuid() != 0 or account.pw_uid == 0:
        yield
        return
    groups = os.getgroups()
    gid = os.getegid()
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
    """Return the content of a small regular file, without blocking. Raises OSError for any other
    file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    data = bytearray()
    with os.fdopen(fd, "rb") as file:
        is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        while is_regular and len(data) <= MOST_BYTES:
            chunk = file.read(_CHUNK_BYTES)
            if not chunk:
                return bytes(data)
            data += chunk
    raise OSError(errno.EINVAL, f"not a regular file of at most {MOST_BYTES >> 20} MiB", path)
