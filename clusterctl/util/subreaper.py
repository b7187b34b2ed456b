"""A subreaper: runs a program, and ends all its descendants when it or our parent ends. Linux only.

    python -I -S THIS_FILE PARENT GRACE COMMAND...

``PARENT`` is the pid of whoever started us. Killing a process group is not enough: Ansible's workers lead
sessions of their own. What loses its parent becomes our child instead of init's. With a ``GRACE`` of some
seconds the program is interrupted first, as by Ctrl-C, and has that long to end, or until SIGHUP. SIGTERM may
come again: whoever started us ends, too, as a rule.
Descriptors beyond the three standard ones stay with us: a lock among them is held as long as we live.
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
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # HUP: the terminal that we were given is closed
_SIGNALLED = 128
_DAY_S = 86400
_STDERR = 2


def main(parent: int, grace_s: int, argv: list[str]) -> int:
    """The exit code of the program."""
    # Blocked, and waited for with SIGCHLD: a handler does not end a wait(2) that begins just after it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the program itself
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1)
    prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was told
        return _SIGNALLED + signal.SIGTERM
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # that of the list itself
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
    """Wait for the program; raises SystemExit when one of these signals comes or the time is up."""
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else _SIGNALLED - code
        left_s = min(max(until - time.monotonic(), 0), _DAY_S)
        number: int = getattr(signal.sigtimedwait({*ending, signal.SIGCHLD}, left_s), "si_signo", 0)
        if number in ending or time.monotonic() >= until:
            raise SystemExit(_SIGNALLED + (number if number in ending else signal.SIGALRM))


def _end_children() -> None:
    """Each that ends leaves its own children to us, until there are none.

    Those that sudo has started may not be ended by us: they end as what they talk to is gone.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):  # so wait(2) says it
        while [child for child in children.read_text().split() if _killed(int(child))]:
            os.wait()


def _killed(child: int) -> bool:
    """Whether a process was ours to end."""
    try:
        os.kill(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
