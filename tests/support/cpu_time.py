"""CPU time of tests, from /proc: a test's own process, and all processes that it started."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tests.support.processes import descendants

# The property of a test in JUnit reports: its CPU seconds.
PROPERTY = "cpu_s"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its descendants until now.

    Not included are daemons and the machines of local clusters, which have left the process tree.
    """
    now = os.times()
    ended = now.user + now.system + now.children_user + now.children_system
    return ended + sum(map(_of_process, descendants(os.getpid())))


def _of_process(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # proc(5): utime, stime, cutime and cstime are the fields 14 to 17; the name of the program,
        # the second field, may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS_PER_S
    return 0.0
