"""A job user's connection to a running cluster, with its scheduler and the list of submitted
jobs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.errors import Notice, SchedulerError
from clusterctl.scheduler.base import AccountingAwayError, Jobs
from clusterctl.scheduler.claims import settle_all
from clusterctl.scheduler.request.arrays import has_task, tasks_of
from clusterctl.scheduler.sites.kinds import ForeignSlurm, Mpirun, OwnSlurm
from clusterctl.scheduler.sites.site import Site
from clusterctl.state.chosen import ChosenCluster, naming_lock_holder
from clusterctl.state.inventory import Inventory, applied_spec, job_inventory
from clusterctl.state.ledger import CLIENT_FACTS, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import RootTransport, Transport
from clusterctl.transport.ssh import Connections

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

PATIENCE_S = 60.0  # for the scheduler
# For commands that show the scheduler's state, because a user wants to know soon.
SHOWN_PATIENCE_S = 10.0
# For commands that can do without the scheduler.
SHORT_PATIENCE_S = 5.0
SBATCH_MAY_HANG_S = 600


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the controller as the job user.

    nodes: node -> connection, which opens at the first command.
    roots: host -> connection as root, in the same way. Empty if other people operate the cluster.
    """

    site: Site
    scheduler: Jobs
    ledger: Ledger
    nodes: Mapping[str, Transport] = field(default_factory=dict)
    roots: Mapping[str, Transport] = field(default_factory=dict)

    @property
    def inventory(self) -> Inventory:
        return self.site.inventory

    @property
    def workspace(self) -> Workspace:
        return self.ledger.workspace

    @property
    def spec(self) -> ClusterSpec:
        """The spec that `up` was last given, read only on demand, because few job commands need the
        spec.
        """
        return applied_spec(self.workspace)

    @property
    def transport(self) -> Transport:
        return self.scheduler.transport

    def transports_of_partition(self, partition: str | None) -> tuple[Transport, ...]:
        """Return connections to the nodes of a partition (None: all) that need the files of jobs as
        the controller has them: () if hosts share a folder.
        """
        partitions = [
            facts for facts in self.inventory.partitions if partition in (None, facts.name)
        ]
        hosts = self.hosts_with_files([name for facts in partitions for name in facts.nodes])
        return tuple(transport for _, transport in hosts if transport is not self.transport)

    def hosts_with_files(self, hosts: Sequence[str]) -> tuple[tuple[str, Transport], ...]:
        """Return (host, connection) of all ``hosts``; only the controller if hosts share the jobs'
        folder.
        """
        own = self.site.folders.apart(hosts)
        transports = tuple((host, self.nodes[host]) for host in own if host in self.nodes)
        return transports or ((self.transport.host, self.transport),)

    def hosts_with_files_of(
        self, user: str, hosts: Sequence[str]
    ) -> tuple[tuple[str, Transport], ...]:
        """Return the result of ``hosts_with_files``, as root if the files are of another user: one whom
        the spec no longer has.
        """
        found = self.hosts_with_files(hosts)
        if user == self.inventory.job_user:
            return found
        return tuple((host, self.roots.get(host, transport)) for host, transport in found)

    def packed_job(self, job_id: str) -> str:
        """Return the ID of the job that runs the task ``job_id`` (`submit --pack`). "" if no job of
        this machine does.
        """
        number, _, task = job_id.partition("_")
        tasks = self.packed_numbers(number) if task else ()
        return number if any(has_task(task, each) for each in tasks) else ""

    def packed_numbers(self, job_id: str) -> Sequence[int]:
        """Return the numbers of the tasks that run inside a job (`submit --pack`); () for another
        job.
        """
        entry = self.ledger.find(job_id)
        if entry is None:
            return ()
        with suppress(ValueError, TypeError, LookupError):
            job = json.loads(self.ledger.kept_file(entry.token, CLIENT_FACTS))["job"]
            return tasks_of(job["array"]) if job["pack"] else ()
        return ()

    def unknown(self, ids: Sequence[str]) -> SchedulerError:
        """Return the error for IDs that no job of the scheduler has."""
        for task in ids:
            if job_id := self.packed_job(task):
                return SchedulerError(
                    f"the scheduler does not know task {task}, which runs inside job {job_id}",
                    code="not-found",
                    about="packed-task",
                    why=f"job {job_id} was submitted with --pack",
                    fix=f"use {job_id}, the whole job. `clusterctl logs {task}` shows the task's "
                    f"output, and after `clusterctl cancel {job_id}`, `clusterctl replay {job_id} "
                    "--failed` runs the tasks that have not completed",
                )
        return self.scheduler.unknown(ids)


def site_of(inventory: Inventory) -> Site:
    """Return the site of a cluster."""
    if inventory.is_foreign:
        return ForeignSlurm(inventory)
    return OwnSlurm(inventory) if inventory.scheduler == "slurm" else Mpirun(inventory)


def connections_of(site: Site, workspace: Workspace) -> Connections:
    """Return connections to the hosts of a cluster. The connection to the controller stays open."""
    inventory = site.inventory
    controller = inventory.controller.name
    return Connections(
        workspace.ssh_config,
        stays=controller,
        path=inventory.path,
        variables=inventory.variables,
    )


def session_of(
    site: Site,
    workspace: Workspace,
    connections: Connections,
    *,
    patience_s: float = PATIENCE_S,
) -> Session:
    """Return a session, which connects to the controller at its first command."""
    inventory = site.inventory
    user = inventory.job_user
    controller = connections.to(inventory.controller.name, user)
    ledger = Ledger(workspace.jobs)
    scheduler = site.client(controller, connections.to, patience_s, ledger)
    nodes = {host.name: connections.to(host.name, user) for host in inventory.compute}
    hosts = [host.name for host in inventory.hosts] if site.as_root else []
    roots = {name: RootTransport(connections.to(name)) for name in hosts}
    return Session(site, scheduler, ledger, nodes, roots)


@contextmanager
def connect_session(
    inventory: Inventory, workspace: Workspace, *, patience_s: float = PATIENCE_S
) -> Iterator[Session]:
    """Open a session, which connects to the controller at its first command."""
    site = site_of(inventory)
    with connections_of(site, workspace) as connections:
        yield session_of(site, workspace, connections, patience_s=patience_s)


@contextmanager
def open_session(chosen: ChosenCluster, *, patience_s: float = PATIENCE_S) -> Iterator[Session]:
    """Open a session with the chosen cluster, using the spec that `up` was last given.

    patience_s: how long to wait for the scheduler, in seconds.

    Raises:
        LockedError: the cluster does not answer while another clusterctl process works on the
            cluster.
    """
    workspace = chosen.workspace()
    with naming_lock_holder(workspace):
        with connect_session(job_inventory(workspace), workspace, patience_s=patience_s) as opened:
            yield opened
        if damage := opened.ledger.damage:
            chosen.note(Notice("jobs-damaged", f"note: {damage}"))
        if refusal := opened.ledger.refusal:
            chosen.note(
                f"note: {refusal.what} ({refusal.why}); the next command updates the jobs' states"
            )


def resolve_submissions(scheduler: Jobs, ledger: Ledger) -> None:
    """Find the jobs of submissions with a lost answer. Record their ids, or their absence, in
    ``ledger``.

    A submission stays unresolved if the job is not in the queue and the accounting does not answer.
    Then choose among the jobs of `submit --first`.
    """
    for entry in ledger.entries():
        if entry.job_id is None and not entry.refused:
            try:
                job = scheduler.by_token(entry.token, entry.submitted_at)
            except AccountingAwayError:
                continue
            if job is not None:
                ledger.update(entry, job_id=job.whole_id)
            elif time.time() - entry.submitted_at > SBATCH_MAY_HANG_S:
                ledger.update(entry, refused=True)
    settle_all(scheduler, ledger)
