"""Slurm's word on every node, and what to make of it: ready, at work, set aside by a person, or sick.

What Slurm itself took out of service is put back once its cause is mended; what a person took out stays out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from clusterctl.errors import CommandError, Failure, SlurmError, UnreachableError, VerifyError
from clusterctl.scheduler.models import NodeInfo
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.scheduler.slurm.config import HEALTH_REASON
from clusterctl.state.inventory import Inventory

_PAUSE_S = 0.2
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL"})
_RESERVED = frozenset({"MAINT", "RESERVED"})
_SLURM = "slurm"  # the account of slurmctld
_OURS = "clusterctl: "  # how the reasons begin that clusterctl gives
# slurmd gives its reasons as root, whom a person may be too: these are its words.
_SLURMDS_WORDS = (
    *("Kill task failed", "Prolog error", "Epilog error", "batch job complete failure", "Low ", "gres/"),
    *("Not responding", "Node unexpectedly rebooted", "Duplicate jobid"),
)


class Standing(Enum):
    """What a node's state means for the proof."""

    READY = "ready"
    BUSY = "busy"
    ASIDE = "aside"
    OUT = "out"  # of service by Slurm's own will, and it answers
    SICK = "sick"


_AT_SERVICE = {
    "IDLE": Standing.READY,
    **dict.fromkeys(("ALLOCATED", "MIXED", "COMPLETING"), Standing.BUSY),
}


@dataclass(frozen=True, slots=True)
class Aside:
    """A node that a person took out of service: their choice, so `up` leaves it."""

    host: str
    reason: str

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}"


@dataclass(slots=True)
class Stand:
    """Every node of the cluster, by what can be done with it. ``resumed`` has what was put back, and why."""

    idle: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    aside: tuple[Aside, ...] = ()
    resumed: dict[str, str] = field(default_factory=dict)


def settle(
    inventory: Inventory, slurm: SlurmClient, *, timeout_s: float, only: Collection[str] = ()
) -> Stand:
    """Wait until every node of the inventory is idle, at work, or set aside; resume what Slurm gave up.

    ``only`` names those to look at; none: all.

    Raises:
        VerifyError: some are not in time; names hosts and Slurm's reasons.
    """
    expected = {host.name for host in inventory.compute}
    deadline = time.monotonic() + timeout_s
    resumed: dict[str, str] = {}
    while True:
        try:
            nodes = {node.name: node for node in slurm.nodes()}
            _resume([node for node in nodes.values() if not only or node.name in only], resumed, slurm)
            sick = tuple(f for f in _sick(expected, nodes) if not only or f.host in only)
            if not sick:
                names = [host.name for host in inventory.compute if not only or host.name in only]
                return _stand([nodes[name] for name in names], resumed)
        except (SlurmError, CommandError, UnreachableError) as exc:
            # slurmctld may still be starting
            sick = (Failure("verify", exc.why or exc.what, inventory.controller.name, "verify"),)
        if time.monotonic() > deadline:
            raise VerifyError(
                "the cluster did not become ready",
                why="; ".join(f"{f.host}: {f.cause}" for f in sick),
                fix="look at `sudo journalctl -u slurmd` there (`clusterctl ssh HOST`), then run `up` again",
                failures=sick,
            )
        time.sleep(_PAUSE_S)


def standing(node: NodeInfo) -> Standing:
    """What the state of a node means for the proof."""
    states = {node.state, *node.flags}
    if _is_reserved(node):
        return Standing.ASIDE
    if states & _DRAINED:
        if not _slurms_own(node):
            return Standing.ASIDE
        return Standing.SICK if "NOT_RESPONDING" in states else Standing.OUT
    if node.state == "DOWN" and "NOT_RESPONDING" not in states:
        return Standing.OUT
    if node.usable and node.state in _AT_SERVICE:
        return _AT_SERVICE[node.state]
    return Standing.SICK


def astray(nodes: Iterable[NodeInfo]) -> tuple[tuple[str, str], ...]:
    """The nodes that Slurm gives no jobs, though no person wants it so, each with what Slurm says."""
    out = (Standing.OUT, Standing.SICK)
    return tuple((node.name, f"Slurm says {_says(node)}") for node in nodes if standing(node) in out)


def out_of_service(nodes: Collection[NodeInfo]) -> tuple[str, ...]:
    """For who waits for nodes on which no job begins: each with its reason, then what puts them back."""
    given_up = astray(nodes)
    aside = [node for node in nodes if standing(node) is Standing.ASIDE]
    unwell = [node for node in aside if node.reason.startswith(HEALTH_REASON)]
    drained = [node.name for node in aside if node not in unwell and not _is_reserved(node)]
    lines = [f"{name}: {why}" for name, why in given_up]
    lines += [f"{node.name}: {_why_aside(node)}" for node in aside]
    if given_up:
        lines.append("`clusterctl up` puts back what Slurm took out itself")
    if unwell:
        lines.append("what the health check drained comes back by itself once it is well")
    if drained:
        lines.append(f"`clusterctl node resume {' '.join(drained)}` puts back what a person drained")
    return tuple(lines)


def _slurms_own(node: NodeInfo) -> bool:
    return node.reason_by == _SLURM or node.reason.startswith((_OURS, *_SLURMDS_WORDS))


def _resume(nodes: Iterable[NodeInfo], resumed: dict[str, str], slurm: SlurmClient) -> None:
    """Put back what Slurm took out of service, once each: what it takes out again has a cause that lasts."""
    for node in nodes:
        if standing(node) is Standing.OUT and node.name not in resumed:
            slurm.resume([node.name])
            resumed[node.name] = _says(node)


def _sick(expected: set[str], nodes: Mapping[str, NodeInfo]) -> tuple[Failure, ...]:
    failures = []
    for name in sorted(expected | set(nodes)):
        node = nodes.get(name)
        if node is None:
            failures.append(Failure("verify", "Slurm does not know this node", name, "verify"))
        elif name not in expected:
            failures.append(Failure("verify", "Slurm still has a node that is gone", name, "verify"))
        elif standing(node) in (Standing.SICK, Standing.OUT):
            failures.append(Failure("verify", f"Slurm says {_says(node)}", name, "verify"))
    return tuple(failures)


def _says(node: NodeInfo) -> str:
    return "+".join((node.state, *node.flags)) + (f": {node.reason}" if node.reason else "")


def _stand(nodes: list[NodeInfo], resumed: dict[str, str]) -> Stand:
    def those(wanted: Standing) -> list[NodeInfo]:
        return [node for node in nodes if standing(node) is wanted]

    return Stand(
        idle=tuple(node.name for node in those(Standing.READY)),
        busy=tuple(node.name for node in those(Standing.BUSY)),
        aside=tuple(Aside(node.name, _why_aside(node)) for node in those(Standing.ASIDE)),
        resumed=resumed,
    )


def _why_aside(node: NodeInfo) -> str:
    if _is_reserved(node):
        return "reserved"
    return f"drained by {node.reason_by or 'somebody'}: {node.reason or 'no reason given'}"


def _is_reserved(node: NodeInfo) -> bool:
    return bool({node.state, *node.flags} & _RESERVED)
