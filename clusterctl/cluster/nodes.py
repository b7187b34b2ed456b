"""Nodes taken out of service, and put back: by hand, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from clusterctl import jobs
from clusterctl.errors import Failure, SchedulerError, TransportError, UsageError, WaitTimeoutError
from clusterctl.scheduler.base import Scheduler, backoff
from clusterctl.scheduler.models import JobInfo, NodeInfo
from clusterctl.spec.words import did_you_mean
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import Transport
from clusterctl.util.parallel import parallel_map

BOOT_S: Final = 1800.0  # a server with eight GPUs tests its memory for many minutes
_ANSWER_S: Final = 20.0
_BOOT_ID: Final = ("cat", "/proc/sys/kernel/random/boot_id")


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


def check_aside(scheduler: Scheduler, names: Sequence[str]) -> None:
    """That no job is at work on these nodes, and none can begin there.

    Raises:
        SchedulerError: somebody has put one back into service.
    """
    if back := [s.node.name for s in states(scheduler, names) if s.node.usable or s.jobs]:
        raise SchedulerError(
            f"{', '.join(back)} takes jobs again: nothing was booted",
            why="somebody has put it back into service meanwhile",
            fix="say it again, once nobody needs it",
        )


def reboot(hosts: Mapping[str, Transport], *, timeout_s: float = BOOT_S) -> None:
    """Boot these hosts anew, all at once, and wait until each of them is up again.

    Raises:
        TransportError: some did not answer, or did not come back in time; one failure a host.
    """
    back = dict(zip(hosts, parallel_map([*hosts.values()], lambda to: _boot(to, timeout_s)), strict=True))
    failures = tuple(Failure("reboot", why, host, "reboot") for host, why in back.items() if why)
    if failures:
        raise TransportError(
            f"{', '.join(str(failure.host) for failure in failures)} did not come back",
            why="; ".join(f"{failure.host}: {failure.cause}" for failure in failures),
            fix="look at its console; once it answers, `clusterctl up` puts it back into service",
            failures=failures,
        )


def _boot(host: Transport, timeout_s: float) -> str:
    """Boot one; why it is not up again, "" if it is."""
    deadline = time.monotonic() + timeout_s
    try:
        before = host.run(_BOOT_ID, timeout_s=_ANSWER_S).stdout
    except TransportError as exc:
        return f"it was not booted: {exc.why or exc.what}"
    with suppress(TransportError):  # it may be gone before it has answered
        host.run(("sudo", "-n", "systemctl", "reboot"), check=False, timeout_s=_ANSWER_S)
    why = "it was told to, and goes on running"
    for pause in backoff():
        host.close()
        try:
            if host.run(_BOOT_ID, timeout_s=_ANSWER_S).stdout != before:
                return ""
        except TransportError as exc:
            why = exc.why or exc.what
        if time.monotonic() > deadline:
            return why
        time.sleep(pause)
    raise AssertionError("the pauses never end")


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
