"""A job user's connection to a running cluster, with its scheduler and the list of submitted
jobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.errors import Notice, SlurmError, UsageError
from clusterctl.scheduler.base import AccountingAwayError, Jobs
from clusterctl.scheduler.claims import settle_all
from clusterctl.scheduler.slurm import SlurmClient
from clusterctl.state.chosen import ChosenCluster, naming_lock_holder
from clusterctl.state.inventory import Inventory, job_inventory
from clusterctl.state.ledger import Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport
from clusterctl.transport.ssh import Connections

if TYPE_CHECKING:
    from clusterctl.scheduler.mpirun import MpirunClient
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.inventory import Inventory

PATIENCE_S = 60.0  # for the scheduler
# For commands that show the scheduler's state, because a user wants to know soon.
SOON_S = 10.0
# For commands that can do without the scheduler.
SHORT_PATIENCE_S = 5.0
_SBATCH_MAY_HANG_S = 600


@dataclass(frozen=True, slots=True)
class Pace:
    """The shortest times between two queries of Slurm about watched jobs, in seconds. 0: as often
    as needed.

    changed_s: on average, after an event in the job's folder, and for jobs that start or end.
    pending_s, running_s: while all jobs are pending, or running. Meanwhile only the jobs' folders
        are read.
    """

    changed_s: float = 0.0
    pending_s: float = 0.0
    running_s: float = 0.0


OWN_PACE = Pace()
# Other people's Slurm serves many users. A running job that is killed records nothing, so Slurm is
# asked.
FOREIGN_PACE = Pace(changed_s=10.0, pending_s=30.0, running_s=300.0)


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the controller as the job user.

    nodes: node -> connection, which opens at the first command.
    unshared_nodes: the same, if hosts share no folder and each node has the files of its jobs.
    """

    inventory: Inventory
    scheduler: Jobs
    ledger: Ledger
    nodes: Mapping[str, Transport] = field(default_factory=dict)
    unshared_nodes: Mapping[str, Transport] = field(default_factory=dict)

    @property
    def pace(self) -> Pace:
        return FOREIGN_PACE if self.inventory.is_foreign else OWN_PACE

    @property
    def workspace(self) -> Workspace:
        return self.ledger.workspace

    @property
    def spec(self) -> ClusterSpec:
        """The spec that `up` was last given, read only on demand, because few job commands need the
        spec.
        """
        return read_applied_spec(self.workspace)

    @property
    def transport(self) -> Transport:
        return self.scheduler.transport

    def transports_of_partition(self, partition: str | None) -> tuple[Transport, ...]:
        """Return connections to ``unshared_nodes`` of a partition (None: all), without the
        controller.
        """
        partitions = [
            facts for facts in self.inventory.partitions if partition in (None, facts.name)
        ]
        names = (name for facts in partitions for name in facts.nodes)
        transports = (self.unshared_nodes[name] for name in names if name in self.unshared_nodes)
        return tuple(transport for transport in transports if transport is not self.transport)

    def hosts_with_files(self, hosts: Sequence[str]) -> tuple[tuple[str, Transport], ...]:
        """Return (host, connection) of all ``hosts``; only the controller if hosts share the jobs'
        folder.
        """
        transports = tuple(
            (host, self.unshared_nodes[host]) for host in hosts if host in self.unshared_nodes
        )
        return transports or ((self.transport.host, self.transport),)

    @property
    def slurm(self) -> SlurmClient:
        """The scheduler, if it is Slurm. Raises UsageError on clusters without Slurm."""
        if isinstance(self.scheduler, SlurmClient):
            return self.scheduler
        raise UsageError(
            "this command needs Slurm, and the cluster does not run Slurm",
            code="needs-slurm",
            why="the cluster's spec has `scheduler: none`",
            fix="run jobs with `clusterctl submit`, or open a shell on a host with `clusterctl "
            "ssh HOST`",
        )


@contextmanager
def connect_session(
    inventory: Inventory, workspace: Workspace, *, patience_s: float = PATIENCE_S
) -> Iterator[Session]:
    """Open a session, which connects to the controller at its first command."""
    with Connections(
        workspace.ssh_config, stays=inventory.controller.name, path=inventory.path
    ) as connections:
        controller = connections.to(inventory.controller.name, inventory.job_user)
        ledger = Ledger(workspace.jobs)
        scheduler = scheduler_client(
            inventory, workspace, controller, connections.to, patience_s, ledger=ledger
        )
        nodes = {
            host.name: connections.to(host.name, inventory.job_user) for host in inventory.compute
        }
        unshared_nodes = {} if inventory.is_shared else nodes
        yield Session(inventory, scheduler, ledger, nodes, unshared_nodes)


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


def read_applied_spec(workspace: Workspace) -> ClusterSpec:
    """Return the spec that `up` was last given."""
    # The import of pydantic models is slow.
    from clusterctl.state.inventory import applied_spec  # noqa: PLC0415

    return applied_spec(workspace)


def scheduler_client(
    inventory: Inventory,
    workspace: Workspace,
    controller: Transport,
    to: Connect,
    patience_s: float,
    *,
    ledger: Ledger | None = None,
) -> Jobs:
    """Return the client for the cluster's scheduler. A Slurm client acts as the user of
    ``controller``.

    ledger: for the records of jobs, if ``controller`` is the job user's connection.
    """
    if inventory.has_slurm:
        # Without a shared folder, the records are on the nodes.
        records = ledger if inventory.is_shared else None
        return SlurmClient(
            controller,
            patience_s=patience_s,
            ledger=records,
            no_accounting=inventory.no_accounting,
            is_foreign=inventory.is_foreign,
        )
    return mpirun_client(workspace, inventory.job_user, controller, to, patience_s)


def mpirun_client(
    cluster: Workspace | Inventory, user: str, controller: Transport, to: Connect, patience_s: float
) -> MpirunClient:
    """Return the client for a cluster without a scheduler. Its module is imported only when
    needed.
    """
    from clusterctl.scheduler.mpirun import MpirunClient  # noqa: PLC0415

    return MpirunClient.of(cluster, user, controller, to, patience_s)


def resolve_submissions(scheduler: Jobs, ledger: Ledger) -> None:
    """Find the jobs of submissions with a lost answer. Record their ids, or their absence, in
    ``ledger``.

    A submission stays unresolved if the job is not in the queue and the accounting does not answer.
    Then finish interrupted submissions of arrays, and choose among the jobs of `submit --first`.
    """
    for entry in ledger.entries_and_parts():
        if entry.job_id is None and not entry.refused:
            try:
                job = scheduler.by_token(entry.token, entry.submitted_at)
            except AccountingAwayError:
                continue
            if job is not None:
                ledger.update(entry, job_id=job.whole_id)
            elif time.time() - entry.submitted_at > _SBATCH_MAY_HANG_S:
                ledger.update(entry, refused=True)
    if isinstance(scheduler, SlurmClient):
        _finish_arrays(scheduler, ledger)
    settle_all(scheduler, ledger)


def _finish_arrays(slurm: SlurmClient, ledger: Ledger) -> None:
    """Start the arrays of interrupted submissions that Slurm has with all parts. Cancel incomplete
    arrays.
    """
    for entry in ledger.entries():
        if not entry.held or entry.job_id is None or entry.refused or ledger.is_superseded(entry):
            continue
        try:
            if entry.held == "complete":
                slurm.release([entry.job_id])
            elif time.time() - entry.submitted_at <= _SBATCH_MAY_HANG_S or slurm.cancel(
                [entry.job_id]
            ):
                # A part may still reach Slurm, or is not cancelled yet. A later command cancels the
                # array.
                continue
            else:
                slurm.transport.run(["rm", "-rf", "--", entry.remote_dir or ""], check=False)
                ledger.update(entry, refused=True)
        except SlurmError as exc:
            if exc.retryable:
                raise
        ledger.update(entry, held="")
