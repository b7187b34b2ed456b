"""The status of a cluster: its nodes, and its waiting and running jobs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.jobs.events import with_hangs
from clusterctl.scheduler.base import JobInfo, NodeInfo
from clusterctl.scheduler.limits import with_limits
from clusterctl.scheduler.session import (
    SOON_S,
    connect_session,
    read_applied_spec,
    scheduler_client,
)
from clusterctl.scheduler.slurm_parse import PartitionInfo
from clusterctl.scheduler.waiting import waits_for_nodes
from clusterctl.spec.units import format_duration
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.inventory import Inventory, job_inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.ssh import Connections
from clusterctl.util.process import start_in_thread

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a cluster.

    ready: whether every node can be used. nodes: all nodes, as shown by the scheduler.
    jobs: the waiting and running jobs.
    partitions: the partitions of a cluster that other people operate. Such a cluster is ready if a
        partition has usable nodes. Its nodes are not listed, and its jobs are only the user's own.
    required_nodes: number of a waiting job -> the nodes that it asks for by name.
    accounting_failure: why Slurm's accounting does not answer; "" if it answers.
    auto_down: the idle time after which the cluster removes itself, and whether the timer is
        active.
    """

    cluster: str
    provider: str
    ready: bool
    nodes: tuple[NodeInfo, ...]
    jobs: tuple[JobInfo, ...]
    accounting_failure: str = ""
    auto_down: dict[str, Any] | None = None
    partitions: tuple[PartitionInfo, ...] = ()
    required_nodes: dict[int, tuple[str, ...]] = field(default_factory=dict)


def status_of(workspace: Workspace) -> Status:
    """Ask the cluster for its status. Raise NotUpError if there is no such cluster.

    If the cluster does not answer: LockedError while another clusterctl process holds its lock,
    else SchedulerError or TransportError.
    """
    with naming_lock_holder(workspace), ExitStack() as stack:
        inventory = job_inventory(workspace)
        if inventory.is_foreign:
            return _status_of_foreign(inventory, workspace)
        connections = stack.enter_context(
            Connections(workspace.ssh_config, stays=inventory.controller.name)
        )
        controller = connections.to(inventory.controller.name)
        scheduler = scheduler_client(inventory, workspace, controller, connections.to, SOON_S)
        accounting_failure = start_in_thread(scheduler.accounting_failure)
        nodes, jobs = scheduler.nodes_and_jobs()
        no_accounting = accounting_failure()
        # Parsing a spec with all its rules takes time, and most specs don't set auto_down.
        has_auto_down = (
            b"auto_down" in workspace.spec.read_bytes() if workspace.spec.exists() else False
        )
        timer = auto_down(read_applied_spec(workspace), controller) if has_auto_down else None
    ready = {n.name for n in nodes if n.usable} >= {host.name for host in inventory.compute}
    # Only the job user can read the files of its jobs.
    with connect_session(inventory, workspace, patience_s=SOON_S) as session:
        active = with_hangs(session, [job for job in jobs if not job.ended])
        active = with_limits(session.scheduler, active)
        required = session.scheduler.required_nodes() if any(map(waits_for_nodes, active)) else {}
    return Status(
        inventory.cluster,
        inventory.provider,
        ready,
        tuple(nodes),
        active,
        no_accounting,
        timer,
        required_nodes=required,
    )


def _status_of_foreign(inventory: Inventory, workspace: Workspace) -> Status:
    with connect_session(inventory, workspace, patience_s=SOON_S) as session:
        partitions, jobs = session.slurm.partitions_and_own_jobs()
        active = with_hangs(session, [job for job in jobs if not job.ended])
        active = with_limits(session.scheduler, active)
    ready = any(partition.usable for partition in partitions)
    return Status(inventory.cluster, inventory.provider, ready, (), active, partitions=partitions)


def auto_down(spec: ClusterSpec, controller: Transport) -> dict[str, Any] | None:
    """Return {"after": idle time until the cluster removes itself, "armed": whether its timer
    runs}.
    """
    if (idle_s := spec.provider.idle_timeout_s) is None:
        return None
    state = controller.run(
        ["systemctl", "is-active", "clusterctl-auto-down.timer"], check=False
    ).stdout.strip()
    return {"after": format_duration(idle_s), "armed": state == "active"}
