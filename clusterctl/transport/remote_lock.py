"""Our own files in a user's home, and locks on them. Runs on the cluster: standard library only, Python 3.9.

Jobs run as the same user: any of them may replace such a file by a pipe or a link, or hold the lock on it. So
opening never waits and follows no link, and a lock is waited for until a deadline; then its holder is named.

As a program: argument PATH, relative to the home folder; prints who holds the lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator

OWNERS = 0o600  # the mode of a file that others of ours may open to write
HELD = 68  # the exit status of a program that gave up waiting for a lock
RETRY_S = 0.1
MOST_NAMED = 3
LONGEST = 100  # characters of a command that is named


def remove(path: bytes) -> None:
    """Remove a file, link or folder with all in it; of a folder, what can't be removed stays."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def remove_unless(is_kind: Callable[[int], bool], path: bytes) -> None:
    """Remove what is in the place of a file (``stat.S_ISREG``) or a folder (``S_ISDIR``) and is none."""
    with contextlib.suppress(FileNotFoundError):
        if not is_kind(os.lstat(path).st_mode):
            remove(path)


def open_own(path: bytes) -> int:
    """Open a regular file to read and write; made if need be, also in the place of what is none."""
    remove_unless(stat.S_ISREG, path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, OWNERS)


def lies_at(path: bytes, fd: int) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def lock_shared(path: bytes, wait_s: float, alive: Callable[[], object]) -> int:
    """Open the file and lock it for reading; calls ``alive`` while waiting, exits after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while True:
        fd = open_own(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if lies_at(path, fd):
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                who = holders_of(os.fstat(fd))
                sys.stderr.write(f"{shown(path)} is still locked after {wait_s:g} s by {who}")
                sys.exit(HELD)
        os.close(fd)
        alive()
        time.sleep(RETRY_S)


def shown(path: bytes) -> str:
    return repr(os.fsdecode(os.path.abspath(path)))


def holders_of(file: os.stat_result) -> str:
    """Which processes of this host hold a file's lock against others, for a message."""
    host, found = os.uname().nodename, sorted(set(holders(file)))
    if not found:
        return f"no process that is seen on {host}: where homes are shared, by one on another node"
    named = [f"process {pid} ({command_of(pid)})" for pid in found[:MOST_NAMED]]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{', '.join(named)}{more} on {host}"


def holders(locked: os.stat_result) -> Iterator[int]:
    """The processes that have the file open with a lock to write.

    /proc/locks has the process that took the lock, which may have ended and left the open file to another.
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), locked):
                        with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
                            if any(line.startswith("lock:") and " WRITE " in line for line in file):
                                yield int(pid)


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(LONGEST + 1)
    except OSError:
        words = b""
    command = os.fsdecode(words.rstrip(b"\0").replace(b"\0", b" "))
    return repr(command if len(command) <= LONGEST else command[:LONGEST] + "...")


def main(path: str) -> None:
    os.chdir(os.path.expanduser("~"))
    sys.stdout.write(holders_of(os.lstat(os.fsencode(path))) + "\n")
