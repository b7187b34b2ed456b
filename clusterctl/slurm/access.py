"""The way to a cluster that is up: its inventory, its controller, Slurm on it, and what was submitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from clusterctl.errors import NotUpError, UsageError
from clusterctl.inventory import Inventory
from clusterctl.records import Ledger
from clusterctl.slurm.client import SlurmClient
from clusterctl.spec import ClusterSpec
from clusterctl.spec.load import load_spec
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


def admin(inventory: Inventory, workspace: Workspace) -> SSHTransport:
    """The controller, as the admin user."""
    return SSHTransport(inventory.controller.name, workspace.ssh_config)
