"""status: how a cluster is."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.cli.jobs import job_table, waiting
from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.scheduler.base import JobInfo, NodeInfo
from clusterctl.scheduler.session import SOON_S, applied, scheduler_of
from clusterctl.spec.units import format_duration, shown_memory
from clusterctl.state.brief import brief_of
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport
from clusterctl.transport.connections import Connections

if TYPE_CHECKING:
    from clusterctl.providers.base import PendingRelease
    from clusterctl.spec.models import ClusterSpec

_MOST_WAITING = 10  # jobs of which it is said what they wait for


@dataclass(frozen=True, slots=True)
class Status:
    """How a cluster is: its nodes, and the jobs that wait or run. ``ready``: every node can be used.

    ``auto_down`` is after which time without work it takes itself down, and whether the timer for that runs.
    """

    cluster: str
    provider: str
    ready: bool
    nodes: tuple[NodeInfo, ...]
    jobs: tuple[JobInfo, ...]
    auto_down: dict[str, Any] | None = None


def status_of(workspace: Workspace) -> Status:
    """Ask the cluster how it is."""
    with naming_lock_holder(workspace), ExitStack() as stack:
        to: Connect
        if (of := brief_of(workspace)) is not None:
            cluster, provider, controller, compute = of.cluster, of.provider, of.controller, of.compute
            to = stack.enter_context(Connections(workspace.ssh_config, stays=controller)).to
            scheduler = scheduler_of(of, to, patience_s=SOON_S)
        else:
            from clusterctl.state.inventory import inventory_of

            known = inventory_of(workspace)
            cluster, provider, controller = known.cluster, known.provider, known.controller.name
            compute = tuple(host.name for host in known.compute)
            to = stack.enter_context(Connections(workspace.ssh_config, stays=controller)).to
            scheduler = scheduler_of(known, to, patience_s=SOON_S)
        nodes, jobs = scheduler.nodes_and_jobs()
        # Most have none of that, and need not be read with all rules for specs.
        may_end = b"auto_down" in workspace.spec.read_bytes() if workspace.spec.exists() else False
        by_itself = auto_down(applied(workspace), to(controller)) if may_end else None
    ready = {n.name for n in nodes if n.usable} >= {*compute}
    return Status(
        cluster, provider, ready, tuple(nodes), tuple(job for job in jobs if not job.ended), by_itself
    )


def status(screen: Screen, options: Options) -> None:
    """Show the state of nodes and jobs."""
    workspace = options.chosen(screen.note).workspace()
    found = status_of(workspace)
    left: tuple[PendingRelease, ...] = ()
    if workspace.releases.exists():
        from clusterctl.providers.base import pending_releases

        left = pending_releases(workspace)
    keys = ("name", "state", "cpus", "memory_mib", "reason")
    rows = [(n.name, n.shown, n.cpus, n.memory_mib, n.reason) for n in found.nodes]
    waits = waiting(found.jobs)
    answer = {
        "cluster": found.cluster,
        "provider": found.provider,
        "ready": found.ready,
        "nodes": [dict(zip(keys, row, strict=True)) for row in rows],
        "jobs": [j.as_dict() for j in found.jobs],
        "waiting": [one.as_dict() for one in waits],
        "auto_down": found.auto_down,
        "pending_releases": [one.as_dict() for one in left],
    }
    if screen.json:  # a table of many jobs takes as long as asking for them
        screen.result(answer)
        return
    lines = [f"cluster {found.cluster} ({found.provider}): {'ready' if found.ready else 'NOT ready'}", ""]
    shown = [(n.name, n.shown, n.cpus, shown_memory(n.memory_mib), n.reason) for n in found.nodes]
    lines += screen.table(["NODE", "STATE", "CPUS", "MEMORY", "REASON"], shown)
    if found.jobs:
        lines += ["", *job_table(screen, found.jobs, users=True)]
        lines += ["", *(one.summary for one in waits[:_MOST_WAITING])] if waits else []
    if by_itself := found.auto_down:
        state = "" if by_itself["armed"] else ", but its timer does not run: `clusterctl up` starts it"
        lines += ["", f"an idle cluster takes itself down after {by_itself['after']}{state}"]
    for one in left:
        lines += ["", str(one), f"  {one.fix}"]
    screen.result(answer, *lines)


def auto_down(spec: ClusterSpec, controller: Transport) -> dict[str, Any] | None:
    """After which time without work the cluster takes itself down, and whether the timer for that runs."""
    if (idle_s := spec.provider.idle_timeout_s) is None:
        return None
    state = controller.run(
        ["systemctl", "is-active", "clusterctl-auto-down.timer"], check=False
    ).stdout.strip()
    return {"after": format_duration(idle_s), "armed": state == "active"}
