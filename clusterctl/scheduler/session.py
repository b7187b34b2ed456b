"""A cluster that is up, as its job user sees it: spec, scheduler, ledger; and what its scheduler decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError
from clusterctl.scheduler.base import JobRequest, Scheduler
from clusterctl.scheduler.slurm import SlurmClient
from clusterctl.state.brief import Brief, SpecBrief, brief_of, note_spec, spec_brief_of
from clusterctl.state.chosen import ChosenCluster, naming_lock_holder
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport
from clusterctl.transport.connections import Connections

if TYPE_CHECKING:
    from clusterctl.scheduler.script import Environment
    from clusterctl.spec.distributions import Distribution
    from clusterctl.spec.job import JobSpec
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.inventory import Inventory

PATIENCE_S = 60.0  # for the scheduler to answer
# A scheduler may be starting, but a user who asks for its state wants to know soon.
SOON_S = 10.0
SHORT_PATIENCE_S = 5.0  # of commands that do something without it: it is there soon, or will not be


@dataclass(frozen=True, slots=True)
class UnsharedNode:
    """A node that sees no folder of the others': what jobs need there, it has itself."""

    host: str
    partition: str | None
    transport: Transport


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the controller as the job user; ``unshared_nodes`` where hosts share no folder.

    ``given`` is the spec, or how it is read once it is needed; ``hosts`` the same of what the hosts have.
    ``workspace`` is set where the spec is the one applied to it.
    """

    given: ClusterSpec | Callable[[], ClusterSpec]
    scheduler: Scheduler
    ledger: Ledger
    unshared_nodes: tuple[UnsharedNode, ...] = ()
    hosts: Callable[[], Distribution] | None = None
    has_pmix: bool = True
    workspace: Workspace | None = None

    @property
    def rules(self) -> ClusterSpec | SpecBrief:
        """The spec as far as jobs are concerned: in brief, if what was noted of it still holds."""
        if self.workspace is None:
            return self.spec
        if (noted := spec_brief_of(self.workspace)) is not None:
            return noted
        note_spec(self.workspace, self.spec)
        return self.spec

    @property
    def spec(self) -> ClusterSpec:
        return self.given() if callable(self.given) else self.given

    @property
    def distribution(self) -> Distribution:
        from clusterctl.spec.distributions import DEFAULT, distribution_of  # noqa: PLC0415 - few verbs ask

        return self.hosts() if self.hosts is not None else distribution_of(DEFAULT)

    @property
    def transport(self) -> Transport:
        """The controller."""
        return self.scheduler.transport

    def transports_of_partition(self, partition: str | None) -> tuple[Transport, ...]:
        """The nodes of a partition, or of all, that have a job's folder of their own."""
        return tuple(
            node.transport
            for node in self.unshared_nodes
            if partition in (None, node.partition) and node.transport is not self.transport
        )

    def hosts_with_files(self, hosts: Sequence[str]) -> tuple[tuple[str, Transport], ...]:
        """Who has what a job wrote that ran on these hosts, its first host first; the controller if none."""
        by_name = {node.host: node.transport for node in self.unshared_nodes}
        found = tuple((host, by_name[host]) for host in hosts if host in by_name)
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
    spec: ClusterSpec | None, workspace: Workspace, *, patience_s: float = PATIENCE_S
) -> Iterator[Session]:
    """Open the connection; it is made at the first use.

    ``spec`` is a resolved one: it has a job user. None: the applied one, which is read when it is needed.
    """
    if spec is None and (brief := brief_of(workspace)) is not None:
        with Connections(workspace.ssh_config, stays=brief.controller) as connections:
            slurm = SlurmClient(connections.to(brief.controller, brief.job_user), patience_s=patience_s)
            given = cache(partial(applied, workspace))
            hosts = partial(distribution_of_hosts, None, workspace)
            yield Session(
                given, slurm, Ledger(workspace.jobs), hosts=hosts, has_pmix=brief.pmix, workspace=workspace
            )
        return
    from clusterctl.state.inventory import inventory_of  # noqa: PLC0415 - as in Session

    up = inventory_of(workspace) if spec is None else None
    spec = spec or applied(workspace)
    user = spec.job_user.name
    known = up or (inventory_of(workspace) if workspace.inventory.exists() or not spec.has_slurm else None)
    unshared = known.compute if known is not None and known.shared_folder.kind == "none" else ()
    with Connections(workspace.ssh_config, stays=spec.controller_host) as connections:
        controller = connections.to(spec.controller_host, user)
        unshared_nodes = tuple(
            UnsharedNode(
                host.name,
                host.partition,
                controller if host.is_controller else connections.to(host.name, user),
            )
            for host in unshared
        )
        scheduler = _client(None if spec.has_slurm else known, user, controller, connections.to, patience_s)
        has_pmix = known is None or known.pmix
        hosts = partial(distribution_of_hosts, spec, workspace)
        yield Session(spec, scheduler, Ledger(workspace.jobs), unshared_nodes, hosts, has_pmix)


@contextmanager
def open_session(chosen: ChosenCluster, *, patience_s: float = PATIENCE_S) -> Iterator[Session]:
    """Open a session of the chosen cluster, whose spec is the applied one.

    patience_s: how long to wait for the scheduler, in seconds.

    Raises:
        LockedError: the cluster does not answer while another clusterctl works on it.
    """
    workspace = chosen.workspace()
    with naming_lock_holder(workspace):
        with session(None, workspace, patience_s=patience_s) as opened:
            yield opened
        if refusal := opened.ledger.refusal:
            chosen.note(f"note: {refusal.what} ({refusal.why}): what became of jobs is asked anew next time")


def applied(workspace: Workspace) -> ClusterSpec:
    """The spec that `up` was last given; what reads it is imported only now."""
    from clusterctl.state.inventory import applied_spec  # noqa: PLC0415 - as in Session

    return applied_spec(workspace)


def distribution_of_hosts(spec: ClusterSpec | None, workspace: Workspace) -> Distribution:
    """What the hosts of the cluster have, or will have; None: the applied spec."""
    from clusterctl.spec.distributions import DEFAULT, distribution_of  # noqa: PLC0415 - as in Session
    from clusterctl.state.inventory import distribution_ahead  # noqa: PLC0415 - as above

    return distribution_ahead(spec or applied(workspace), workspace) or distribution_of(DEFAULT)


def _client(
    inventory: Inventory | None,
    user: str,
    controller: Transport,
    to: Connect,
    patience_s: float,
    *,
    has_pmix: bool = True,
) -> Scheduler:
    """Slurm; or mpirun on the hosts of this inventory, for jobs of ``user``."""
    if inventory is None:
        return SlurmClient(controller, patience_s=patience_s, has_pmix=has_pmix)
    from clusterctl.scheduler.mpirun import MpirunClient  # noqa: PLC0415 - not with Slurm

    return MpirunClient(inventory, user, controller, to, patience_s=patience_s)


def scheduler_of(inventory: Inventory | Brief, to: Connect, *, patience_s: float = PATIENCE_S) -> Scheduler:
    """The cluster's scheduler as the admin user, who may do more than a job user."""
    if isinstance(inventory, Brief):
        return SlurmClient(to(inventory.controller), patience_s=patience_s, has_pmix=inventory.pmix)
    by_mpirun = not inventory.has_slurm and inventory.job_user is not None
    user, controller = inventory.job_user or "", to(inventory.controller.name)
    one = inventory if by_mpirun else None
    return _client(one, user, controller, to, patience_s, has_pmix=inventory.pmix)


def script_of(spec: ClusterSpec | SpecBrief, job: JobSpec, environment: Environment | None = None) -> str:
    """The text of a job's script, for plain sbatch, or for bash without a scheduler."""
    from clusterctl.scheduler import script  # noqa: PLC0415 - most verbs need none
    from clusterctl.util.assets import payload_hash  # noqa: PLC0415 - likewise

    environment = environment or script.PLAIN
    if not (isinstance(spec, SpecBrief) or spec.has_slurm):
        from clusterctl.scheduler.mpirun import render_mpirun_script  # noqa: PLC0415 - as above

        return render_mpirun_script(spec, job, payload_hash=payload_hash(), environment=environment)

    script.partition_name(spec, job)
    interval_s = spec.monitoring.interval
    return script.render_script(
        job, payload_hash=payload_hash(), interval_s=interval_s, environment=environment
    )


def request_of(spec: ClusterSpec | SpecBrief, job: JobSpec, entry: JobEntry, script: str) -> JobRequest:
    """The request to start a job, whose script has that name in its folder."""
    at = entry.submitted_at
    request = JobRequest(entry.token, entry.name, entry.remote_dir or "", script, submitted_at=at)
    if isinstance(spec, SpecBrief) or spec.has_slurm:
        return request  # its script says the rest
    from clusterctl.scheduler.mpirun import with_nodes  # noqa: PLC0415 - as above

    return with_nodes(request, spec, job)


_SBATCH_MAY_HANG_S = 600


def resolve_submissions(scheduler: Scheduler, ledger: Ledger) -> None:
    """Find out what became of submissions whose answer was lost, and write it down."""
    for entry in ledger.entries():
        if entry.job_id is None and not entry.refused:
            found = scheduler.by_token(entry.token, entry.submitted_at)
            if found is not None:
                ledger.update(entry, job_id=found.whole_id)
            elif time.time() - entry.submitted_at > _SBATCH_MAY_HANG_S:
                ledger.update(entry, refused=True)
