"""Settings of the kernel for nodes on one machine: changed for a cluster, put back after the last one.

About 25 systemds fit in the default of 128 inotify instances; the next ones die with "Failed to allocate
manager object" and their nodes stay unknown to Slurm. The neighbours of all machines, n times n of them,
share one table of 1,024: from 32 nodes on, MPI's connections fail: "Resource temporarily unavailable".

Linux 6.18 gives a session (autogroup) all of a CPU for minutes while its threads there wake each other and it
has a process on another CPU too, as a training has. All others wait, the kernel's own threads among them:
nodes neither boot nor answer. Where systemd has booted the machine, nodes are in control groups of their
own, which no autogroup is made of.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from clusterctl.state.workspace import write_atomic

NODES_IN_DEFAULT_LIMITS = 16
_WANTED = {
    "fs/inotify/max_user_instances": 8192,
    "fs/inotify/max_user_watches": 524288,
    "net/ipv4/neigh/default/gc_thresh2": 32768,
    "net/ipv4/neigh/default/gc_thresh3": 65536,
}
_AUTOGROUP = "kernel/sched_autogroup_enabled"
_SYS = Path("/proc/sys")
_RECORD = Path("/run/clusterctl-limits.json")  # a reboot forgets it, and the limits too


def raise_for(nodes: int) -> tuple[str, ...]:
    """Raise what is too low for so many nodes; returns what was changed, in words."""
    if nodes <= NODES_IN_DEFAULT_LIMITS:
        return ()
    said = []
    for name, wanted in _WANTED.items():
        now = int((_SYS / name).read_text())
        if now < wanted:
            _change(name, now, wanted)
            said.append(
                f"raised {name.replace('/', '.')} from {now} to {wanted} until the last cluster is down"
            )
    return tuple(said)


def share_by_process() -> tuple[str, ...]:
    """Have processes share the CPUs, not sessions, where that can be chosen; returns what was changed."""
    with suppress(OSError):  # not in every kernel, nor for a container to write: nodes run all the same
        if now := int((_SYS / _AUTOGROUP).read_text()):
            _change(_AUTOGROUP, now, 0)
            return (f"set {_AUTOGROUP.replace('/', '.')} from {now} to 0 until the last cluster is down",)
    return ()


def _change(name: str, now: int, wanted: int) -> None:
    original = json.loads(_RECORD.read_text()) if _RECORD.exists() else {}
    write_atomic(_RECORD, json.dumps({name: now} | original))
    (_SYS / name).write_text(str(wanted))


def restore() -> None:
    """Put the settings back as they were."""
    if _RECORD.exists():
        for name, value in json.loads(_RECORD.read_text()).items():
            with suppress(OSError):  # not ours to write after all
                (_SYS / name).write_text(str(value))
        _RECORD.unlink()
