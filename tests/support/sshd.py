"""What the program sshd needs on this machine: its folder, and a port that stays free."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def allow_sshd() -> None:
    """Create the folder of unprivileged processes, without which sshd refuses to run as root, and to
    show its settings. After the start of a machine it is missing until the first sshd has run.
    """
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that refuses connections, and that only a program that sets
    SO_REUSEADDR can listen on, as sshd does. The kernel gives it to nobody else.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        # Only now, so that two of these sockets never share a port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(held.getsockname()[1])
