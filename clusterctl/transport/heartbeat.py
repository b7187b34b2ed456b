"""Whether the other end of an SSH connection still lives: a request now and then that it has to answer.

TCP alone does not tell: the kernel of a host whose sshd is frozen, or starved, goes on to acknowledge.
"""

from __future__ import annotations

import threading

from clusterctl.transport.lean import paramiko

EVERY_S = 15.0
PATIENCE_S = 60.0  # a node may be busy: many local ones boot on few cores


def watch(transport: paramiko.Transport, *, every_s: float = EVERY_S, patience_s: float = PATIENCE_S) -> None:
    """Close the connection, as if it broke, once a request has gone without an answer for that long."""
    name = f"heartbeat of {transport.name}"
    threading.Thread(target=_beat, args=(transport, every_s, patience_s), name=name, daemon=True).start()


def _beat(transport: paramiko.Transport, every_s: float, patience_s: float) -> None:
    while transport.is_active():
        transport.join(every_s)  # it ends when the connection does
        impatient = threading.Timer(patience_s, transport.close)
        impatient.daemon = True
        impatient.start()
        try:
            transport.global_request("keepalive@openssh.com", wait=True)  # refused, which is an answer
        except (paramiko.SSHException, OSError, EOFError):
            return  # it broke by itself
        finally:
            impatient.cancel()
