"""A lock file that names its holder and exists only while it is held: one clusterctl at a time.

The kernel releases the lock of a killed process; the file that stays is harmless and reused by the next.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterctl.errors import LockedError
from clusterctl.util.disk import REFUSALS

WAIT_S = 600.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the lock, ``since`` Unix seconds; ``user`` is an account's name, if known."""

    verb: str
    pid: int
    since: float
    user: str = ""

    def __str__(self) -> str:
        since = time.localtime(self.since)
        today = time.strftime("%F", since) == time.strftime("%F")
        of_user = f" of {self.user}" if self.user else ""
        when = time.strftime("%T" if today else "%F %T", since)
        return f"`clusterctl {self.verb}`{of_user} (pid {self.pid}) has been running since {when}"


@contextmanager
def hold(
    path: Path,
    verb: str,
    *,
    what: str,
    wait_s: float = WAIT_S,
    waiting: Callable[[str], None],
    folder: Path | None = None,
) -> Iterator[None]:
    """Hold the lock while the body runs. ``waiting`` gets one message about the holder; ``wait_s`` bounds it.

    Where the disk takes no new file, ``folder``, if it is there, is locked instead.

    Raises:
        LockedError: it is held by another for all that time; names it. ``what`` names what is locked.
        OSError: the file can't be made.
    """
    deadline = time.monotonic() + wait_s
    told = False
    while (held := _acquire(path, folder)) is None:
        who = str(holder(path) or "another clusterctl is running")
        if time.monotonic() >= deadline:
            raise LockedError(f"{what} is locked", why=who, fix="wait until it is done, or stop that process")
        if not told:
            waiting(f"{who}; waiting until it is done, {wait_s / 60:g} minutes at most")
            told = True
        time.sleep(_PAUSE_S)
    try:
        if not stat.S_ISDIR(os.fstat(held).st_mode):
            with suppress(OSError):  # a full disk: it is held without a word
                os.truncate(held, 0)
                os.write(held, json.dumps(asdict(Holder(verb, os.getpid(), time.time(), _user()))).encode())
        yield
    finally:
        if not stat.S_ISDIR(os.fstat(held).st_mode):
            with suppress(OSError):  # of a disk that became read-only: left as the dead leave it
                path.unlink()  # before the lock goes: whoever waits then looks for another file
        os.close(held)


def holder(path: Path) -> Holder | None:
    """The holder of the lock; None if it is free."""
    try:
        with path.open() as file:
            who = Holder(**json.load(file))
            # What the dead wrote is no reason to touch the lock.
            return who if _lives(who.pid) and _is_locked(file.fileno()) else None
    except (OSError, ValueError, TypeError):
        return None


def _user() -> str:
    """The account that runs this clusterctl; of root's helper, the one that started it through sudo."""
    if name := os.environ.get("SUDO_USER") if os.geteuid() == 0 else None:
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def open_private(path: str | Path, _flags: int = 0) -> int:
    """Open a file to be locked, also as an `opener` of `open`; no link is followed.

    It is closed to other accounts, also a file of an older version: an account that can read it can lock it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _acquire(path: Path, folder: Path | None) -> int | None:
    """The descriptor of the empty, locked file, or of the folder; None if another holds either."""
    while True:
        locked, other = path, folder
        try:
            fd = open_private(path)
        except OSError as exc:
            if exc.errno not in REFUSALS or folder is None or not folder.is_dir():
                raise
            locked, other = folder, path
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), locked.stat()):
                    if other is None or not _is_held(other):
                        return fd
                    if locked is path:
                        path.unlink()
                    raise BlockingIOError
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its holder removed it between our two steps


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return _is_locked(fd)
    finally:
        os.close(fd)
