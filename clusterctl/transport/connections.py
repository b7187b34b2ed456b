"""One SSH connection a host, made when it is first needed and kept until all is done."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

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
