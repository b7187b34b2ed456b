"""The hosts of an `ssh_config`, each with its connection."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

from clusterctl.transport.base import Transport
from clusterctl.transport.ssh import SSHTransport


class Connections(ExitStack):
    """The hosts of an `ssh_config`. As a context manager it closes them all.

    The connection to the host ``stays`` is left open for the next verb.
    """

    def __init__(self, ssh_config: Path, *, stays: str | None = None) -> None:
        super().__init__()
        self._ssh_config = ssh_config
        self._stays = stays
        self._open: dict[tuple[str, str | None], Transport] = {}
        self._lock = threading.Lock()

    def to(self, host: str, user: str | None = None) -> Transport:
        """Return the connection to a host of that name, as this user (default: the admin user)."""
        with self._lock:
            if (host, user) not in self._open:
                stays = host == self._stays
                self._open[host, user] = SSHTransport(host, self._ssh_config, user=user, stays=stays)
                self.callback(self._open[host, user].close)
            return self._open[host, user]
