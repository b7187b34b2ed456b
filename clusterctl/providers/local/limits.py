"""Kernel limits that many nodes on one machine run into: raised for a cluster, put back after the last one.

About 25 systemds fit in the default of 128 inotify instances; the next ones die with "Failed to allocate
manager object" and their nodes stay unknown to Slurm. The neighbours of all machines, n times n of them,
share one table of 1,024: from 32 nodes on, MPI's connections fail: "Resource temporarily unavailable".
"""

from __future__ import annotations

import json
from pathlib import Path

NODES_IN_DEFAULT_LIMITS = 16
_WANTED = {
    "fs/inotify/max_user_instances": 8192,
    "fs/inotify/max_user_watches": 524288,
    "net/ipv4/neigh/default/gc_thresh2": 32768,
    "net/ipv4/neigh/default/gc_thresh3": 65536,
}
_SYS = Path("/proc/sys")
_RECORD = Path("/run/clusterctl-limits.json")  # a reboot forgets it, and the limits too


def raise_for(nodes: int) -> tuple[str, ...]:
    """Raise what is too low for so many nodes; returns what was changed, in words."""
    if nodes <= NODES_IN_DEFAULT_LIMITS:
        return ()
    original = json.loads(_RECORD.read_text()) if _RECORD.exists() else {}
    said = []
    for name, wanted in _WANTED.items():
        now = int((_SYS / name).read_text())
        if now < wanted:
            original.setdefault(name, now)
            _RECORD.write_text(json.dumps(original))
            (_SYS / name).write_text(str(wanted))
            said.append(
                f"raised {name.replace('/', '.')} from {now} to {wanted} until the last cluster is down"
            )
    return tuple(said)


def restore() -> None:
    """Put the limits back as they were."""
    if _RECORD.exists():
        for name, value in json.loads(_RECORD.read_text()).items():
            (_SYS / name).write_text(str(value))
        _RECORD.unlink()
