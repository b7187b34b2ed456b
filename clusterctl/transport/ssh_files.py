"""The files by which SSH finds a cluster's hosts, ours and anybody's: `ssh -F`."""

from __future__ import annotations

from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace, write_atomic


def write_ssh_files(inventory: Inventory, workspace: Workspace) -> None:
    """Have our own account's way to these machines in the workspace."""
    write_atomic(workspace.known_hosts, inventory.known_hosts())
    ssh_config = inventory.ssh_config(key=workspace.key, known_hosts=workspace.known_hosts)
    write_atomic(workspace.ssh_config, ssh_config)
