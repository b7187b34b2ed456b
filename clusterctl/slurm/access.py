"""What every verb about jobs works with: the cluster, Slurm on it as the job user, and what was submitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from clusterctl.inventory import Inventory
from clusterctl.records import Ledger
from clusterctl.slurm.client import SlurmClient
from clusterctl.spec import ClusterSpec
from clusterctl.transport.base import Transport
from clusterctl.transport.ssh import SSHTransport
from clusterctl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the controller as the job user."""

    spec: ClusterSpec
    slurm: SlurmClient
    ledger: Ledger

    @property
    def transport(self) -> Transport:
        """The controller."""
        return self.slurm.transport


@contextmanager
def session(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> Iterator[Session]:
    """Open the connection; it is made at the first use. ``spec`` is a resolved one: it has a job user."""
    transport = SSHTransport(inventory.controller.name, workspace.ssh_config, user=spec.job_user.name)
    try:
        yield Session(spec, SlurmClient(transport), Ledger(workspace.jobs))
    finally:
        transport.close()
