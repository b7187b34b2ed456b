"""One clusterctl at a time: a lock file that says who holds it, and that exists only while somebody does.

The kernel drops the lock of whoever is killed; the file that stays is harmless and taken over by the next.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from clusterctl.errors import LockedError

WAIT_S = 600.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """Who is at work: ``since`` in Unix seconds; ``user`` is an account's name, where it is known."""

    verb: str
    pid: int
    since: float
    user: str = ""

    def __str__(self) -> str:
        since = time.localtime(self.since)
        today = time.strftime("%F", since) == time.strftime("%F")
        return (
            f"`clusterctl {self.verb}`{self.user and f' of {self.user}'} (pid {self.pid}) is at work since "
            f"{time.strftime('%T' if today else '%F %T', since)}"
        )


@contextmanager
def hold(
    path: Path, verb: str, *, what: str, wait_s: float = WAIT_S, waiting: Callable[[str], None]
) -> Iterator[None]:
    """Hold the lock while the body runs. ``waiting`` is told once whom we wait for, at most ``wait_s``.

    Raises:
        LockedError: it is held by another for all that time; names it. ``what`` names what is locked.
        OSError: the file can't be made.
    """
    deadline = time.monotonic() + wait_s
    told = False
    while (file := _acquire(path)) is None:
        who = str(holder(path) or "another clusterctl is at work")
        if time.monotonic() >= deadline:
            raise LockedError(
                f"{what} is being worked on", why=who, fix="wait until it is done, or stop that process"
            )
        if not told:
            waiting(f"{who}; waiting until it is done, {wait_s / 60:g} minutes at most")
            told = True
        time.sleep(_PAUSE_S)
    with file:
        json.dump(asdict(Holder(verb, os.getpid(), time.time(), _user())), file)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before the lock goes: whoever waits then looks for another file


def holder(path: Path) -> Holder | None:
    """Who holds the lock; None if nobody does."""
    try:
        with path.open() as file:
            who = Holder(**json.load(file))
            # What the dead wrote is no reason to touch the lock.
            return who if _lives(who.pid) and _is_locked(file) else None
    except (OSError, ValueError, TypeError):
        return None


def _user() -> str:
    """Whose clusterctl this is: of root's helper, who has started it through sudo."""
    if name := os.environ.get("SUDO_USER") if os.geteuid() == 0 else None:
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def open_private(path: str | Path, _flags: int = 0) -> int:
    """Open a file to be locked, an `opener` too: whoever can read one can hold it. No link is followed.

    A file that others could read, an older version's, is closed to them.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _acquire(path: Path) -> TextIO | None:
    """The empty, locked file; None if another holds it."""
    while True:
        file = os.fdopen(open_private(path), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.truncate()
                    return file
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.close()  # its holder removed it between our two steps
