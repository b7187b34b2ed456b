"""Ports of this machine that lead to ports of a node, for a notebook or a dashboard that runs there."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from clusterctl.errors import UnreachableError, UsageError
from clusterctl.transport.openssh import ALONE, OpenSSH

_HERE = "127.0.0.1"
_SYNTAX = re.compile(r"(?:([0-9]{1,5}):)?([0-9]{1,5})", re.ASCII)
_LAST_PORT = 65_535
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Forward:
    """``local`` on this machine's loopback leads to ``remote`` on the node."""

    local: int
    remote: int


def parse_forwards(texts: Sequence[str]) -> tuple[Forward, ...]:
    """``8888`` or ``LOCAL:REMOTE``, each, with local ports that are free.

    Raises:
        UsageError: one is neither, or its local port is taken.
    """
    forwards = tuple(_parsed(text) for text in texts)
    for i, forward in enumerate(forwards):
        if any(forward.local == other.local for other in forwards[:i]):
            raise UsageError(f"--forward names the local port {forward.local} twice")
        _check_free(forward)
    return forwards


@contextmanager
def forwarded(ssh: OpenSSH, node: str, forwards: Sequence[Forward]) -> Iterator[None]:
    """Open the ports until the end of the ``with``. They lead to the node's own loopback too.

    Raises:
        UnreachableError: the node can't be reached, or a port was taken meanwhile.
    """
    if not forwards:
        yield
        return
    ports = [word for f in forwards for word in ("-L", f"{_HERE}:{f.local}:localhost:{f.remote}")]
    # `cat` ends when its input does: however we end, the ports are closed.
    argv = ssh.argv(node, ["cat"], *ALONE, "-o", "ExitOnForwardFailure=yes", *ports)
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,  # Ctrl-C is not for it
        ) as process,
    ):
        try:
            if not _echoes(process):
                complaints.seek(0)
                why = complaints.read().decode(errors="replace").strip()
                raise UnreachableError(f"{node}: no port could be forwarded", why=why, host=node)
            yield
        finally:
            _end(process)


def _parsed(text: str) -> Forward:
    match = _SYNTAX.fullmatch(text)
    ports = [int(port) for port in match.groups(default=match[2])] if match else []
    if not ports or not all(0 < port <= _LAST_PORT for port in ports):
        raise UsageError(
            f"--forward {text!r} is not a port",
            fix="say --forward 8888, or --forward LOCAL:REMOTE such as 9000:8888",
        )
    return Forward(*ports)


def _check_free(forward: Forward) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ssh does
        try:
            probe.bind((_HERE, forward.local))
        except OSError as exc:
            raise UsageError(
                f"port {forward.local} of this machine can't be forwarded",
                why=exc.strerror or str(exc),
                fix=f"take another: --forward LOCAL:{forward.remote}",
            ) from exc


def _echoes(process: subprocess.Popen[bytes]) -> bool:
    """Whether the other end answers, which it does once all ports are open."""
    assert process.stdin is not None  # noqa: S101 - pipes were asked for
    assert process.stdout is not None  # noqa: S101
    with suppress(BrokenPipeError):
        process.stdin.write(b"\n")
        process.stdin.flush()
    return process.stdout.readline() == b"\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None  # noqa: S101 - a pipe was asked for
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:  # a connection through the port is still open
        process.kill()
