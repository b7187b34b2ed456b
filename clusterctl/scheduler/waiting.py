"""Causes for which jobs wait, if Slurm's reason alone does not tell. The others are in causes.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from clusterctl.scheduler.availability import (
    DRAINED_STATES,
    HEALTH_REASON,
    Availability,
    availability_of,
    is_reserved,
    waits_for_nodes,
)
from clusterctl.scheduler.base import NodeInfo
from clusterctl.scheduler.case import Case, Explanation
from clusterctl.scheduler.slurm_values import expand_nodes

_UNAVAILABLE: Final = re.compile(r"UnavailableNodes:(\S+)")
_MOST_SHOWN: Final = 3  # nodes


def unavailable_nodes(case: Case) -> Explanation | None:
    """Nodes are reserved, or out of service. Evidence: their states, because Slurm's reason is the
    same.
    """
    if not waits_for_nodes(case.job):
        return None
    named = _UNAVAILABLE.search(case.job.reason)
    names = case.evidence.required or _expand(named[1] if named else "")
    partitions = set(case.job.partition.split(","))
    nodes = (
        [node for node in case.evidence.nodes if node.name in names]
        if names
        else [node for node in case.evidence.nodes if partitions & set(node.partitions)]
    )
    out = [node for node in nodes if not node.usable and not is_reserved(node)]
    if out:
        more = f" (and {len(out) - _MOST_SHOWN} more)" if len(out) > _MOST_SHOWN else ""
        text = "; ".join(_state_of(node) for node in out[:_MOST_SHOWN]) + more
        return Explanation(
            "waiting-for-nodes-out-of-service",
            f"the job needs nodes that are out of service: {text}",
            _fix(case, out),
        )
    if any(map(is_reserved, nodes)):
        return Explanation(
            "waiting-for-reserved-nodes",
            f"the nodes that the job needs are reserved{case.soon}",
            "wait, or use a shorter --time, so that the job ends before the reservation begins: "
            "`clusterctl ssh -- scontrol show reservation`",
        )
    return None


def _expand(nodelist: str) -> tuple[str, ...]:
    try:
        return expand_nodes(nodelist)
    except ValueError:
        return ()


def _state_of(node: NodeInfo) -> str:
    """Return ``n2 is drained: /tmp is full``."""
    states = {node.state, *node.flags}
    words = (
        ("not responding", {"NOT_RESPONDING"}),
        ("down", {"DOWN", "ERROR", "UNKNOWN"}),
        ("drained", DRAINED_STATES),
        ("powered off", {"POWERED_DOWN", "FUTURE"}),
    )
    state = next((word for word, those in words if states & those), node.shown)
    return f"{node.name} is {state}" + (f": {node.reason}" if node.reason else "")


def _fix(case: Case, out: Sequence[NodeInfo]) -> str:
    names = " ".join(node.name for node in out[:_MOST_SHOWN])
    if case.is_operator and all(node.reason.startswith(HEALTH_REASON) for node in out):
        command = f"`clusterctl ssh {out[0].name}`"
        return f"correct this on the node ({command}); its health check then returns it to service"
    if case.is_operator and all(availability_of(node) is Availability.DRAINED for node in out):
        return (
            f"a person drained them: once they may be used again, `clusterctl node resume {names}`"
        )
    return f"{case.repair}; `clusterctl ssh -- sinfo -R` shows why they are out of service"


def beyond_group_limit(case: Case) -> Explanation | None:
    """The job alone exceeds a limit for all jobs of an account, user or QOS."""
    if not case.job.exceeds:
        return None
    return Explanation(
        "waiting-beyond-job-limit",
        f"the job can never start: it asks for {case.job.exceeds} ({case.job.reason})",
        "cancel the job with `clusterctl cancel`, and ask for less, or use another --qos or "
        "--account",
    )
