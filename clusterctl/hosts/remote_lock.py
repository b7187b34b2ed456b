"""Holds the lock of a cluster on its controller, against administrators on other machines. Runs as root.
Standard library, Python 3.9.

Prints `held`, and then runs until its output is closed; or prints the name of the process that holds the
lock, and ends.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

LOCK = "/run/clusterctl-up.lock"
HELD = "held"
MOST = 1000


def main(name: str, path: str = LOCK) -> None:
    """name: of this process, for others that want the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, MOST).decode(errors="replace")
        sys.stdout.write(f"{holder or 'another process'}\n")
        return
    os.ftruncate(fd, 0)
    os.write(fd, name.encode())
    sys.stdout.write(f"{HELD}\n")
    sys.stdout.flush()
    while True:
        # The program ends when its output is closed (``clusterctl.transport.base``).
        time.sleep(3600)
