"""Acting with an account's rights and reading an account's files, for programs that run as root on
hosts, Ansible's modules among them.

For Python 3.6 and its standard library.
"""

import errno
import os
import pwd
import stat
from contextlib import contextmanager
from typing import Iterator, List, Optional

MOST_BYTES = 16 << 20  # of a file
# The kernel refuses to read files of /proc/sys into a buffer of several MiB.
_CHUNK_BYTES = 1 << 16


@contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Run the body with an account's rights, because root must not follow links that a job has
    created. The real uid stays root's.
    """
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


def _groups(uid: int, gid: int) -> List[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        # The account was removed.
        return [gid]


def read_regular(path: str, *, most: Optional[int] = MOST_BYTES, follow: bool = True) -> bytes:
    """Return the content of a regular file, without blocking. Raise OSError for any other file.

    most: size limit in bytes. None: no limit. follow: follow a link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    data = bytearray()
    with os.fdopen(os.open(path, flags), "rb") as file:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        while is_regular and (most is None or len(data) <= most):
            chunk = file.read(_CHUNK_BYTES)
            if not chunk:
                return bytes(data)
            data += chunk
    limit = "" if most is None else f" of at most {most >> 20} MiB"
    raise OSError(errno.EINVAL, f"not a regular file{limit}", path)
