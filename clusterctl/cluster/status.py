"""How a cluster is: its nodes, and the jobs that wait or run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.scheduler.base import JobInfo, NodeInfo
from clusterctl.scheduler.session import SOON_S, applied, scheduler_of
from clusterctl.spec.units import format_duration
from clusterctl.state.brief import brief_of
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport
from clusterctl.transport.connections import Connections

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec


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
    """Ask the cluster how it is.

    Raises:
        NotUpError: there is no such cluster.
        LockedError: it does not answer while another clusterctl works on it.
        SchedulerError, TransportError: it does not answer.
    """
    with naming_lock_holder(workspace), ExitStack() as stack:
        to: Connect
        if (of := brief_of(workspace)) is not None:
            cluster, provider, controller, compute = of.cluster, of.provider, of.controller, of.compute
            to = stack.enter_context(Connections(workspace.ssh_config, stays=controller)).to
            scheduler = scheduler_of(of, to, patience_s=SOON_S)
        else:
            # A cluster without Slurm, whose record of hosts has to be read in full.
            from clusterctl.state.inventory import inventory_of  # noqa: PLC0415

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


def auto_down(spec: ClusterSpec, controller: Transport) -> dict[str, Any] | None:
    """After which time without work the cluster takes itself down, and whether the timer for that runs."""
    if (idle_s := spec.provider.idle_timeout_s) is None:
        return None
    state = controller.run(
        ["systemctl", "is-active", "clusterctl-auto-down.timer"], check=False
    ).stdout.strip()
    return {"after": format_duration(idle_s), "armed": state == "active"}
