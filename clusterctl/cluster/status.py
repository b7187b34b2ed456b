"""How a cluster is: its nodes, and the jobs that wait or run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.scheduler.base import JobInfo, NodeInfo
from clusterctl.scheduler.session import SOON_S, applied, client_of
from clusterctl.spec.units import format_duration
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.facts import facts_of
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.ssh import Connections

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
        facts = facts_of(workspace)
        connections = stack.enter_context(Connections(workspace.ssh_config, stays=facts.controller))
        controller = connections.to(facts.controller)
        scheduler = client_of(facts, workspace, controller, connections.to, SOON_S)
        nodes, jobs = scheduler.nodes_and_jobs()
        # Most have none of that, and need not be read with all rules for specs.
        may_end = b"auto_down" in workspace.spec.read_bytes() if workspace.spec.exists() else False
        by_itself = auto_down(applied(workspace), controller) if may_end else None
    ready = {n.name for n in nodes if n.usable} >= {*facts.compute}
    active = tuple(job for job in jobs if not job.ended)
    return Status(facts.cluster, facts.provider, ready, tuple(nodes), active, by_itself)


def auto_down(spec: ClusterSpec, controller: Transport) -> dict[str, Any] | None:
    """After which time without work the cluster takes itself down, and whether the timer for that runs."""
    if (idle_s := spec.provider.idle_timeout_s) is None:
        return None
    state = controller.run(
        ["systemctl", "is-active", "clusterctl-auto-down.timer"], check=False
    ).stdout.strip()
    return {"after": format_duration(idle_s), "armed": state == "active"}
