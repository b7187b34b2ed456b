"""Fair shares of the CPUs while clusters run beside each other here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SETTING = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextmanager
def without_autogroup(setting: Path = SETTING) -> Iterator[None]:
    """Schedule each process by itself, not by its session, where we may; afterwards as it was.

    Linux 6.18 gives a session all of a CPU for minutes, as long as its threads there wake each other and it
    has a process on another CPU too: a training does that. All others on the CPU wait, even the kernel's own
    threads (mounts, namespaces), so that nodes neither boot nor answer. See docs/local.md;
    labs of somebody's own machines, which no local cluster is on, need it here.
    """
    changed = False
    with suppress(OSError):  # none of this kernel's, or not ours to write
        changed = setting.read_text().strip() != "0"  # else it is for a cluster or another run to put back
        if changed:
            setting.write_text("0")
    try:
        yield
    finally:
        if changed:
            with suppress(OSError):
                setting.write_text("1")
