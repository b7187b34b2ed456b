"""TCP ports of a node that a job claims, so that two jobs on the node never use the same port.

A claim is a Unix socket with an abstract name. The kernel lets a single process of the node bind a
name, whoever its user is, and releases the name when that process ends, even if it is killed.
Abstract names belong to a network namespace, as ports do. There is no file that another user could
create, and no folder that may be read-only or private to a job.
Uses only the standard library of Python 3.8 or newer.
"""

from __future__ import annotations

import errno
import fcntl
import socket
from collections.abc import Iterator
from contextlib import suppress

# These ports are above the ranges of the kernel and srun.
FIRST_PORT = 65000
PORTS = 536
FIRST_DESCRIPTOR = 100
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def claim_job_port(job: int, *, hand_on: bool = False) -> tuple[int, bool]:
    """Claim a port at which the ranks of a job meet. Return it, and whether it is of jobs' range.

    If no port of that range is free, the kernel assigns another port.

    job: the job's number, which selects the port that is tried first. hand_on: see ``claim``.
    """
    own = FIRST_PORT + job % PORTS
    for port in (*range(own, FIRST_PORT + PORTS), *range(FIRST_PORT, own)):
        if claim(port, hand_on=hand_on):
            return port, True
    for port in _assigned_ports():
        if claim(port, hand_on=hand_on):
            return port, False
    return own, False


def claim(port: int, *, hand_on: bool = False) -> bool:
    """Claim a port until this process ends. Return False if the port is in use.

    A process of another job has then claimed the port, or a program without a claim is using it.

    hand_on: whether programs that this process starts, or that replace it, keep the claim.
        Default: no.
    """
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(f"\0clusterctl-port-{port}")
        is_claimed = True
    except OSError as exc:
        # A security policy may forbid such names. Then only the port shows whether it is in use.
        is_claimed = exc.errno != errno.EADDRINUSE
    if not is_claimed or _is_in_use(port):
        claimed.close()
        return False
    # The copy is never closed. A shell's programs use low descriptors.
    if hand_on:
        fcntl.fcntl(claimed, fcntl.F_DUPFD, FIRST_DESCRIPTOR)
    else:
        fcntl.fcntl(claimed, fcntl.F_DUPFD_CLOEXEC, 0)
    claimed.close()
    return True


def _is_in_use(port: int) -> bool:
    """Return whether a server could not listen on a port of this node at all its addresses.

    The reason may be a server, the local end of a connection, or a connection that ended within the
    last minute. The latter prevents servers without the option SO_REUSEADDR.
    """
    for family in _FAMILIES:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # An empty address means all addresses of the node.
                probe.bind(("", port))
        except OSError as exc:
            # Other errors: the node has no IPv6, or the port is reserved for root.
            if exc.errno == errno.EADDRINUSE:
                return True
    return False


def _assigned_ports() -> Iterator[int]:
    """Yield ports that the kernel assigns, until it has none."""
    with suppress(OSError):
        for _ in range(PORTS):
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            yield int(port)
