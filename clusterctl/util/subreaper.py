"""Subreaper: runs a program, and kills all its descendants when the program or PARENT ends.

    python -I -S THIS_FILE PARENT GRACE COMMAND...

PARENT is the pid of the process that starts the subreaper. Killing a process group is not enough,
because Ansible's workers have their own sessions. Orphaned descendants become children of the
subreaper instead of init's. If GRACE is not 0, the program first gets SIGINT, and GRACE seconds to
end; SIGHUP ends this time early. A second SIGTERM has no effect: it may arrive when PARENT ends.
Other open file descriptors stay open in the subreaper and are not inherited: a lock on such a file
is held as long as the subreaper runs. Linux only.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

# Options of prctl(2).
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SIGNALLED = 128
_DAY_S = 86400
_STDERR = 2


def main(parent: int, grace_s: int, argv: list[str]) -> int:
    # Block the signals and wait for them, because a handler does not interrupt a wait(2) that
    # starts later.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, signal.SIGCHLD})
    # Ctrl-C sends SIGINT to the program as well, which decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1)
    prctl(_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before prctl.
    if os.getppid() != parent:
        return _SIGNALLED + signal.SIGTERM
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # The descriptor of the listing itself is closed already.
        with suppress(OSError):
            os.set_inheritable(descriptor, descriptor <= _STDERR)
    try:
        defaults = (signal.SIGINT, *_ENDING)
        program = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=defaults, setsigmask=mask)
        try:
            return _exit_code(program, _ENDING)
        except SystemExit:
            if grace_s:
                os.kill(program, signal.SIGINT)
                _exit_code(program, {signal.SIGHUP}, time.monotonic() + grace_s)
            raise
    finally:
        _end_children()


def _exit_code(program: int, ending: Collection[int], until: float = math.inf) -> int:
    """Wait for the program and return its exit code.

    Exit at a signal in ``ending``, or at time ``until`` as if by SIGALRM.
    """
    while True:
        code = _reap(program)
        if code is not None:
            return code
        left_s = min(max(until - time.monotonic(), 0), _DAY_S)
        received = signal.sigtimedwait({*ending, signal.SIGCHLD}, left_s)
        if received is not None and received.si_signo in ending:
            raise SystemExit(_SIGNALLED + received.si_signo)
        if time.monotonic() >= until:
            raise SystemExit(_SIGNALLED + signal.SIGALRM)


def _reap(program: int) -> int | None:
    """Reap ended children. Return the program's exit code if it is among them."""
    while True:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _SIGNALLED - code
        if child == 0:
            return None


def _end_children() -> None:
    """Kill all children. This process inherits the children of killed children, so repeat until all
    are dead.

    Children under sudo belong to root and can't be killed. They end because their input or output
    is closed.
    """
    # `os.wait` raises ChildProcessError if no child is left.
    with suppress(ChildProcessError), open(f"/proc/self/task/{os.getpid()}/children") as children:
        while [child for child in children.read().split() if _killed(int(child))]:
            os.wait()
            children.seek(0)


def _killed(child: int) -> bool:
    """Kill a process. Return False if it has ended or belongs to another user."""
    try:
        os.kill(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
