"""Availability of nodes: ready, busy, drained by an administrator, or taken out of service by
Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

from clusterctl.scheduler.base import JobInfo, NodeInfo
from clusterctl.util.numbers import counted

# First words of the reason that the health check of a node sets.
HEALTH_REASON: Final = "clusterctl health:"
DRAINED_STATES: Final = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL"})
_RESERVED = frozenset({"MAINT", "RESERVED"})
_SLURM = "slurm"  # slurmctld's account
# First words of reasons set by clusterctl and slurmd, because they run as root, like some
# administrators.
_OUR_WORDS = ("clusterctl: ", "clusterctl watcher: ")
_SLURMDS_WORDS = (
    "Kill task failed",
    "Prolog error",
    "Epilog error",
    "batch job complete failure",
    "Low ",
    "gres/",
    "Not responding",
    "Node unexpectedly rebooted",
    "Duplicate jobid",
)
# Slurm's reasons for which jobs wait if nodes are not available.
NO_NODES: Final = r"ReqNodeNotAvail|UnavailableNodes|Nodes.required.for.job.are.DOWN|NodeDown"


class Availability(Enum):
    READY = "ready"
    BUSY = "busy"
    DRAINED = "drained by an administrator, or reserved, so `up` does not change it"
    OUT = "taken out of service by Slurm, although it answers"
    FAILED = "failed"


_AT_SERVICE = {
    "IDLE": Availability.READY,
    **dict.fromkeys(("ALLOCATED", "MIXED", "COMPLETING"), Availability.BUSY),
}


def availability_of(node: NodeInfo) -> Availability:
    """Return the availability of a node, derived from its state, flags and reason."""
    states = {node.state, *node.flags}
    is_drained = bool(states & DRAINED_STATES)
    by_slurm = node.reason_by == _SLURM or node.reason.startswith((*_OUR_WORDS, *_SLURMDS_WORDS))
    if is_reserved(node) or (is_drained and not by_slurm):
        return Availability.DRAINED
    if (is_drained or node.state == "DOWN") and "NOT_RESPONDING" not in states:
        return Availability.OUT
    return _AT_SERVICE.get(node.state, Availability.FAILED) if node.usable else Availability.FAILED


def is_reserved(node: NodeInfo) -> bool:
    """Return whether a node belongs to a reservation, such as one for maintenance."""
    return not _RESERVED.isdisjoint({node.state, *node.flags})


def group_by_availability(nodes: Iterable[NodeInfo]) -> dict[Availability, list[NodeInfo]]:
    """Return availability -> nodes. Every ``Availability`` is a key, even if no node has it."""
    nodes_by_availability: dict[Availability, list[NodeInfo]] = {key: [] for key in Availability}
    for node in nodes:
        nodes_by_availability[availability_of(node)].append(node)
    return nodes_by_availability


def find_unusable_nodes(nodes: Iterable[NodeInfo]) -> tuple[tuple[str, str], ...]:
    """Return (name, "Slurm reports STATE: REASON") of each node that has failed or is out of
    service.
    """
    out = (Availability.OUT, Availability.FAILED)
    return tuple(
        (node.name, f"Slurm reports {slurm_state_text(node)}")
        for node in nodes
        if availability_of(node) in out
    )


def slurm_state_text(node: NodeInfo) -> str:
    """Return a node's state, flags and reason: ``DOWN+DRAIN: disk full``."""
    return "+".join((node.state, *node.flags)) + (f": {node.reason}" if node.reason else "")


def drain_reason(node: NodeInfo) -> str:
    """Return "drained by USER: REASON", or "reserved" for a reserved node."""
    if is_reserved(node):
        return "reserved"
    return f"drained by {node.reason_by or 'an unknown user'}: {node.reason or 'no reason given'}"


def kept_out(nodes: Iterable[NodeInfo]) -> dict[str, str]:
    """Return node -> why, for nodes that are out of service because a person wants it."""
    drained = group_by_availability(nodes)[Availability.DRAINED]
    return {node.name: drain_reason(node) for node in drained if HEALTH_REASON not in node.reason}


def out_text(reasons: Mapping[str, str]) -> str:
    """Return ", 1 node out (drained by ada: noisy disk)". "": none is out. reasons: from
    ``kept_out``.
    """
    if not reasons:
        return ""
    return f", {counted(len(reasons), 'node')} out ({'; '.join(dict.fromkeys(reasons.values()))})"


def waits_for_nodes(job: JobInfo) -> bool:
    """Return whether Slurm's reason is that nodes are not available."""
    return re.search(NO_NODES, job.reason) is not None
