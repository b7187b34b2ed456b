"""The usage of clusters that were removed: a file of each, written by `down`, in the folder of all
workspaces.

The accounting goes with its cluster, and people are asked months later who has used what. A file has
a JSON object in each line: the first about the cluster, then one for each time in which a job held
nodes. A damaged line is counted and left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from clusterctl.scheduler.slurm.usage import AllocatedTime
from clusterctl.state.workspace import state_home, write_atomic
from clusterctl.util.disk import read_lines
from clusterctl.util.numbers import finite

# A name of a cluster does not begin with a dot.
_FOLDER: Final = ".usage"
_MOST: Final = 256 << 20
_TEXTS: Final = frozenset({"job", "user", "account", "partition"})
_REQUIRED: Final = frozenset(each.name for each in fields(AllocatedTime) if each.default is MISSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUsage:
    """The usage of a cluster.

    source: accounting, or runs: the runs of its jobs, if it has no accounting.
    unread: the number of records of jobs that can't be read.
    notes: lines for the user about damaged records of runs.
    """

    cluster: str
    source: str
    held: tuple[AllocatedTime, ...]
    unread: int = 0
    notes: tuple[str, ...] = ()


def save_usage(cluster_id: str, usage: ClusterUsage) -> Path:
    """Write the usage of a cluster that is being removed. Return the file.

    Raises MachineError if it can't be written.
    """
    folder = state_home() / _FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    head = {
        "version": 1,
        "cluster": usage.cluster,
        "id": cluster_id,
        "saved_at": time.time(),
        "source": usage.source,
        "unread": usage.unread,
    }
    rows = (head, *map(asdict, usage.held))
    path = folder / f"{usage.cluster}-{cluster_id}.jsonl"
    write_atomic(path, "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    return path


def saved_usages(up: Mapping[str, str], cluster: str | None = None) -> Iterator[ClusterUsage]:
    """Yield the usage of removed clusters. cluster: only of those with this name. None: of all.

    up: name -> ID of the clusters that are up, whose accounting is asked: a `down` that was
        interrupted has written their file, too.
    """
    for path in sorted((state_home() / _FOLDER).glob("*.jsonl")):
        name, _, cluster_id = path.stem.rpartition("-")
        if cluster in (None, name) and up.get(name) != cluster_id:
            yield _read(path, name)


def _read(path: Path, cluster: str) -> ClusterUsage:
    lines = read_lines(path) if path.stat().st_size <= _MOST else iter([(1, None)])
    rows = [row for _, row in lines]
    head = (rows[0] if rows else None) or {}
    is_head = "job" not in head and "id" in head
    held = [_held(row, cluster) for row in rows[is_head:]]
    unread = finite(head.get("unread")) or 0
    return ClusterUsage(
        cluster=cluster,
        source="runs" if head.get("source") == "runs" else "accounting",
        held=tuple(each for each in held if each is not None),
        unread=int(unread) + held.count(None),
    )


def _held(row: dict[str, Any] | None, cluster: str) -> AllocatedTime | None:
    """Return the time in a line; None if the line is damaged."""
    known = {each.name: (row or {}).get(each.name) for each in fields(AllocatedTime)}
    values = {name: value for name, value in known.items() if value is not None}
    texts = [values[name] for name in _TEXTS & values.keys()]
    numbers = [values[name] for name in values.keys() - _TEXTS - {"cluster"}]
    is_whole = values.keys() >= _REQUIRED
    if (
        is_whole
        and all(isinstance(each, str) for each in texts)
        and None not in map(finite, numbers)
    ):
        return AllocatedTime(**{**values, "cluster": cluster})
    return None
