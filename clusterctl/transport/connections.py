"""One SSH connection a host, made when it is first needed and kept until all is done."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.ssh import SSHTransport


class Connections:
    """The hosts of an `ssh_config`, as the admin user. As a context manager it closes them all."""

    def __init__(self, ssh_config: Path) -> None:
        self._ssh_config = ssh_config
        self._open: dict[str, SSHTransport] = {}
        self._lock = threading.Lock()

    def to(self, host: str) -> SSHTransport:
        """The connection to a host of that name."""
        with self._lock:
            if host not in self._open:
                self._open[host] = SSHTransport(host, self._ssh_config)
            return self._open[host]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for transport in self._open.values():
            transport.close()


def write_ssh_files(inventory: Inventory, workspace: Workspace) -> None:
    """Have our own account's way to these machines in the workspace."""
    write_atomic(workspace.known_hosts, inventory.known_hosts())
    ssh_config = inventory.ssh_config(key=workspace.key, known_hosts=workspace.known_hosts)
    write_atomic(workspace.ssh_config, ssh_config)
