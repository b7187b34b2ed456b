"""Fair shares of the CPUs while clusters run beside each other here."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

SETTING = Path("/proc/sys/kernel/sched_autogroup_enabled")
# The setting before the first of the runs that changed it, each of which holds a lock. After a run that was
# killed the next one puts it back. A reboot forgets both.
RECORD = Path("/run/clusterctl-tests-autogroup")


@contextmanager
def without_autogroup(setting: Path = SETTING, record: Path = RECORD) -> Iterator[None]:
    """Schedule each process by itself, not by its session, where we may; afterwards as it was.

    Linux 6.18 gives a session all of a CPU for minutes, as long as its threads there wake each other and it
    has a process on another CPU too: a training does that. All others on the CPU wait, even the kernel's own
    threads (mounts, namespaces), so that nodes neither boot nor answer. See docs/local.md;
    labs of somebody's own machines, which no local cluster is on, need it here.
    """
    file = None
    with suppress(OSError):  # none of this kernel's, or not ours to write
        now = setting.read_text().strip()
        file = _shared(record)
        if now != "0":  # else it is for a cluster or another run to put back
            setting.write_text("0")
            file.write(now)
            file.flush()
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError), file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another run needs it
                if before := record.read_text():
                    setting.write_text(before[0])
                record.unlink()


def _shared(record: Path) -> TextIO:
    """The record, locked together with other runs."""
    while True:
        file = record.open("a")
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # the last run before us ended, and removed it
