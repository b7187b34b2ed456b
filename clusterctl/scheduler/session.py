"""A cluster that is up, as its job user sees it: facts, scheduler, ledger; and what its scheduler decides."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.scheduler.base import Jobs
from clusterctl.scheduler.slurm import SlurmClient
from clusterctl.state.chosen import ChosenCluster, naming_lock_holder
from clusterctl.state.facts import ClusterFacts, facts_of
from clusterctl.state.submissions import Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport
from clusterctl.transport.ssh import Connections

if TYPE_CHECKING:
    from clusterctl.scheduler.mpirun import MpirunClient
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.inventory import Inventory

PATIENCE_S = 60.0  # for the scheduler to answer
# A scheduler may be starting, but a user who asks for its state wants to know soon.
SOON_S = 10.0
SHORT_PATIENCE_S = 5.0  # of commands that do something without it: it is there soon, or will not be


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the controller as the job user.

    unshared_nodes: where hosts share no folder, the hosts that run jobs; what jobs need there, they have
    themselves.
    """

    facts: ClusterFacts
    scheduler: Jobs
    ledger: Ledger
    unshared_nodes: Mapping[str, Transport] = field(default_factory=dict)

    @property
    def workspace(self) -> Workspace:
        return self.ledger.workspace

    @property
    def spec(self) -> ClusterSpec:
        """The applied spec, which few verbs about jobs read."""
        return applied(self.workspace)

    @property
    def transport(self) -> Transport:
        """The controller."""
        return self.scheduler.transport

    def transports_of_partition(self, partition: str | None) -> tuple[Transport, ...]:
        """The nodes of a partition, or of all, that have a job's folder of their own."""
        names = (name for one in self.facts.partitions if partition in (None, one.name) for name in one.nodes)
        found = (self.unshared_nodes[name] for name in names if name in self.unshared_nodes)
        return tuple(transport for transport in found if transport is not self.transport)

    def hosts_with_files(self, hosts: Sequence[str]) -> tuple[tuple[str, Transport], ...]:
        """Who has what a job wrote that ran on these hosts, its first host first; the controller if none."""
        found = tuple((host, self.unshared_nodes[host]) for host in hosts if host in self.unshared_nodes)
        return found or ((self.transport.host, self.transport),)

    @property
    def slurm(self) -> SlurmClient:
        """Slurm, for what nothing else can do; a UsageError where this cluster has none."""
        if isinstance(self.scheduler, SlurmClient):
            return self.scheduler
        raise UsageError(
            "that needs Slurm, and this cluster has none",
            code="needs-slurm",
            why="its spec says `scheduler: none`",
            fix="`clusterctl submit` runs jobs, `clusterctl ssh HOST` opens a shell on a host",
        )


@contextmanager
def session(
    facts: ClusterFacts, workspace: Workspace, *, patience_s: float = PATIENCE_S
) -> Iterator[Session]:
    """Open the connection; it is made at the first use."""
    with Connections(workspace.ssh_config, stays=facts.controller) as connections:
        controller = connections.to(facts.controller, facts.job_user)
        scheduler = client_of(facts, workspace, controller, connections.to, patience_s)
        unshared_nodes = {
            host: controller if host == facts.controller else connections.to(host, facts.job_user)
            for host in (() if facts.is_shared else facts.compute)
        }
        yield Session(facts, scheduler, Ledger(workspace.jobs), unshared_nodes)


@contextmanager
def open_session(chosen: ChosenCluster, *, patience_s: float = PATIENCE_S) -> Iterator[Session]:
    """Open a session of the chosen cluster, whose spec is the applied one.

    patience_s: how long to wait for the scheduler, in seconds.

    Raises:
        LockedError: the cluster does not answer while another clusterctl works on it.
    """
    workspace = chosen.workspace()
    with naming_lock_holder(workspace):
        with session(facts_of(workspace), workspace, patience_s=patience_s) as opened:
            yield opened
        if refusal := opened.ledger.refusal:
            chosen.note(f"note: {refusal.what} ({refusal.why}): what became of jobs is asked anew next time")


def applied(workspace: Workspace) -> ClusterSpec:
    """The spec that `up` was last given, for verbs that seldom read it: its models are slow to import."""
    from clusterctl.state.inventory import applied_spec  # noqa: PLC0415

    return applied_spec(workspace)


def client_of(
    facts: ClusterFacts, workspace: Workspace, controller: Transport, to: Connect, patience_s: float
) -> Jobs:
    """Slurm as the user of ``controller`` sees it, or mpirun on the hosts that ``to`` connects to."""
    if facts.has_slurm:
        return SlurmClient(controller, patience_s=patience_s)
    return mpirun_client(workspace, facts.job_user, controller, to, patience_s)


def mpirun_client(
    cluster: Workspace | Inventory, user: str, controller: Transport, to: Connect, patience_s: float
) -> MpirunClient:
    """The jobs of a cluster without a scheduler; most clusters have Slurm, and need none of that."""
    from clusterctl.scheduler.mpirun import MpirunClient  # noqa: PLC0415

    return MpirunClient.of(cluster, user, controller, to, patience_s)


_SBATCH_MAY_HANG_S = 600


def resolve_submissions(scheduler: Jobs, ledger: Ledger) -> None:
    """Find out what became of submissions whose answer was lost, and write it down."""
    for entry in ledger.entries():
        if entry.job_id is None and not entry.refused:
            found = scheduler.by_token(entry.token, entry.submitted_at)
            if found is not None:
                ledger.update(entry, job_id=found.whole_id)
            elif time.time() - entry.submitted_at > _SBATCH_MAY_HANG_S:
                ledger.update(entry, refused=True)
