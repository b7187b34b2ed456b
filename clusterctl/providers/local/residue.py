"""An independent look at this machine for what is left of a cluster: the kernel's tables, not our records."""

from __future__ import annotations

import os
from pathlib import Path

from clusterctl.providers.local import cgroups, machine, mounts, network, processes
from clusterctl.providers.local.layout import bridge_name, cluster_dir, link_name, netns_name


def residue(cluster_id: str) -> tuple[str, ...]:
    """Everything of the cluster that is still there, a line each; empty when it is gone."""
    folder = cluster_dir(cluster_id)
    found = [
        f"machine {name} (pid {pids[0]})" for name, pids in machine.alive().items() if _ours(name, cluster_id)
    ]
    found += [f"process {pid} in {netns_name(cluster_id)}" for pid in _processes_in(cluster_id)]
    found += [f"process {pid} on a node's file system" for pid in mounts.rooted_under(folder)]
    found += [f"mount {point}" for point in mounts.mounted_under(folder)]
    for place in (folder, mounts.doomed(folder)):
        found += [f"loop device {name}" for name in mounts.loops_under(place)]
    names = {link_name(cluster_id), bridge_name(cluster_id)}
    found += [f"link {name}" for name in network.links() if name in names or f"c{cluster_id}-" in name]
    found += [f"control group {group}" for group in cgroups.groups(f"c{cluster_id}-")]
    if (network.NETNS_DIR / netns_name(cluster_id)).exists():
        found.append(f"network namespace {netns_name(cluster_id)}")
    found += [f"folder {path}" for path in (folder, mounts.doomed(folder)) if path.exists()]
    return tuple(found)


def _ours(name: str, cluster_id: str) -> bool:
    return name.startswith(f"c{cluster_id}-")


def _processes_in(cluster_id: str) -> list[int]:
    """Processes that live in the cluster's network namespace."""
    try:
        namespace = (network.NETNS_DIR / netns_name(cluster_id)).stat()
    except FileNotFoundError:
        return []

    def inside(process: Path) -> bool | None:
        return os.path.samestat((process / "ns/net").stat(), namespace) or None

    return [pid for pid, _ in processes.look(inside)]
