"""The way to a cluster that is up: its inventory, who runs its jobs, and what was submitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from clusterctl.errors import NotUpError, UsageError
from clusterctl.inventory import Inventory
from clusterctl.records import Ledger
from clusterctl.scheduler.base import Scheduler
from clusterctl.slurm.client import SlurmClient
from clusterctl.spec import ClusterSpec
from clusterctl.spec.load import load_spec
from clusterctl.transport.base import Transport
from clusterctl.transport.connections import Connections
from clusterctl.transport.ssh import SSHTransport
from clusterctl.workspace import Workspace

PATIENCE_S = 60.0  # for who runs the jobs to answer


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the controller as the job user."""

    spec: ClusterSpec
    scheduler: Scheduler
    ledger: Ledger

    @property
    def transport(self) -> Transport:
        """The controller."""
        return self.scheduler.transport

    @property
    def slurm(self) -> SlurmClient:
        """Slurm, for what nothing else can do.

        Raises:
            UsageError: this cluster has none.
        """
        if isinstance(self.scheduler, SlurmClient):
            return self.scheduler
        raise UsageError("this cluster has no Slurm", why="its spec says `scheduler: none`")


@contextmanager
def session(spec: ClusterSpec, workspace: Workspace, *, patience_s: float = PATIENCE_S) -> Iterator[Session]:
    """Open the connection; it is made at the first use. ``spec`` is a resolved one: it has a job user."""
    transport = SSHTransport(spec.controller_host, workspace.ssh_config, user=spec.job_user.name)
    try:
        yield Session(spec, SlurmClient(transport, patience_s=patience_s), Ledger(workspace.jobs))
    finally:
        transport.close()


def inventory_of(workspace: Workspace) -> Inventory:
    """The inventory that `up` left.

    Raises:
        UsageError: the cluster is not up, or its record is damaged.
    """
    try:
        return Inventory.model_validate_json(workspace.hosts.read_bytes())
    except ValidationError as exc:
        raise UsageError(
            f"what is noted of cluster {workspace.root.name!r} is damaged",
            where=str(workspace.hosts),
            fix="run `clusterctl up`, which writes it anew",
        ) from exc
    except FileNotFoundError as exc:
        raise NotUpError(
            f"cluster {workspace.root.name!r} is not up",
            where=str(workspace.root),
            fix="run `clusterctl up` first, or name another with --cluster (`clusterctl list` shows them)",
        ) from exc


def spec_as_raised(workspace: Workspace) -> ClusterSpec:
    """The spec that `up` was last given, which may differ from what the user's file says by now."""
    return load_spec(workspace.spec)


def admins_scheduler(
    inventory: Inventory, connections: Connections, *, patience_s: float = PATIENCE_S
) -> Scheduler:
    """Who runs the jobs, as the admin user, who sees and may do more than a job user."""
    return SlurmClient(connections.to(inventory.controller.name), patience_s=patience_s)
