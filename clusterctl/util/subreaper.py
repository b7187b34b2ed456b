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
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_SIGNALLED = 128
_STDERR = 2


def main(parent: int, grace_s: int, argv: list[str]) -> int:
    """The exit code of the program."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # HUP: the terminal that we were given is closed
        signal.signal(number, _end)
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
        defaults = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # One that comes before we know the program's pid would kill it without its grace.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
        program = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=defaults, setsigmask=mask)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return _exit_code(program)
        except SystemExit:
            _interrupt(program, grace_s)
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        _end_children()


def _end(number: int, _: FrameType | None) -> None:
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(_SIGNALLED + number)


def _exit_code(program: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _SIGNALLED - code


def _interrupt(program: int, grace_s: int) -> None:
    """Let it end by itself; raises SystemExit when the time is up, or SIGHUP comes."""
    if grace_s:
        signal.signal(signal.SIGALRM, _end)
        signal.alarm(grace_s)
        with suppress(ProcessLookupError, ChildProcessError):  # it ended in this moment
            os.kill(program, signal.SIGINT)
            _exit_code(program)


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
