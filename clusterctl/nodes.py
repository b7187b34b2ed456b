"""Nodes taken out of service, and put back: by hand, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from clusterctl import jobs
from clusterctl.errors import UsageError, WaitTimeoutError
from clusterctl.inventory import Inventory
from clusterctl.scheduler.base import Scheduler, backoff
from clusterctl.scheduler.models import JobInfo, NodeInfo
from clusterctl.spec.words import did_you_mean


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as the scheduler has it, and the jobs that are at work on it."""

    node: NodeInfo
    jobs: tuple[JobInfo, ...] = ()


def drain(scheduler: Scheduler, names: Sequence[str], reason: str) -> tuple[NodeState, ...]:
    """Let no more jobs begin on these nodes; those that run go on. How the nodes stand then."""
    scheduler.drain(names, reason)
    return states(scheduler, names)


def resume(scheduler: Scheduler, names: Sequence[str]) -> tuple[NodeState, ...]:
    """Let jobs begin on these nodes again. How they stand then."""
    marked = [state.node.name for state in states(scheduler, names) if not state.node.usable]
    if marked:  # Slurm refuses to resume what is in service
        scheduler.resume(marked)
    return states(scheduler, names)


def states(scheduler: Scheduler, names: Collection[str]) -> tuple[NodeState, ...]:
    """These nodes, and the jobs on them."""
    active = jobs.active(scheduler)
    return tuple(
        NodeState(node, tuple(job for job in active if node.name in job.nodes))
        for node in scheduler.nodes()
        if node.name in names
    )


def wait_idle(
    scheduler: Scheduler,
    names: Sequence[str],
    *,
    timeout_s: float | None,
    on_change: Callable[[tuple[str, ...]], None],
) -> tuple[NodeState, ...]:
    """Wait until no job is at work on these nodes; ``on_change`` is told the ids of those that still are.

    Raises:
        WaitTimeoutError: ``timeout_s`` has passed. The nodes stay as they are.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    told: tuple[str, ...] = ()
    for pause in backoff():
        found = states(scheduler, names)
        ids = tuple(dict.fromkeys(job.id for state in found for job in state.jobs))
        if not ids:
            return found
        if ids != told:
            on_change(ids)
            told = ids
        if deadline is not None and time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"jobs are still at work on {', '.join(names)}: {', '.join(ids)}",
                fix="wait longer, or end them: `clusterctl cancel`; the nodes take no new ones",
            )
        time.sleep(pause)
    raise AssertionError("the pauses never end")


def refuse_at_work(found: Sequence[NodeState]) -> None:
    """That no job is at work on these nodes.

    Raises:
        UsageError: some are.
    """
    busy = {state.node.name: state.jobs for state in found if state.jobs}
    if busy:
        raise UsageError(
            f"jobs are at work on {', '.join(busy)}",
            why="; ".join(
                f"job {job.id} ({job.name}) of {job.user} on {node}"
                for node, at in busy.items()
                for job in at
            ),
            fix="drain it first: `clusterctl node drain NODE --reason TEXT --wait`; or end them: --force",
        )


def check_names(inventory: Inventory, names: Sequence[str]) -> None:
    """That all of them are nodes of the cluster.

    Raises:
        UsageError: one is not.
    """
    known = [host.name for host in inventory.compute]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"its nodes are {', '.join(known)}"
            raise UsageError(f"the cluster has no node {name!r}", fix=hint)
