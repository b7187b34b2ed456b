"""How a command reaches a host. Commands are argv lists; whatever reaches a remote shell is quoted."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from clusterctl.errors import TransportError
from clusterctl.terminal import printable

BULK = 16 << 20  # bytes that are worth a connection of their own


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished command said."""

    rc: int
    stdout: str
    stderr: str


class Conversation(Protocol):
    """A running command that is written to and read from. It must not say much while it is written to."""

    def send(self, data: bytes) -> None:
        """Write to its stdin; waits while it does not read.

        Raises:
            CommandError: it has ended.
            UnreachableError: the connection broke.
        """

    def receive(self) -> bytes:
        """Some of its stdout, as soon as there is any; b"" at the end of it."""

    def finish(self) -> None:
        """Close its stdin, read its stdout to the end, and wait until it has ended.

        Raises:
            CommandError: it exited non-zero.
            UnreachableError: the connection broke.
        """


class Transport(Protocol):
    """One host, as one user."""

    @property
    def host(self) -> str:
        """Name of the host, for messages."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command to its end.

        Its stdout is text here; what is not UTF-8 becomes U+FFFD. Bytes as they are come from ``stream``.

        Raises:
            CommandError: it exited non-zero and ``check`` is set. A command that a signal ended has rc -1.
            UnreachableError: no connection, or no answer within ``timeout_s``. It may still be running.
        """

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        """Run a command without stdin and yield its stdout as it comes.

        Closing the generator ends the command.

        Raises:
            CommandError: it exited non-zero.
            UnreachableError: the connection broke.
        """

    def converse(self, argv: Sequence[str], *, bulk: bool = False) -> AbstractContextManager[Conversation]:
        """Start a command that reads stdin and answers on stdout.

        Leaving the context without ``finish`` closes its stdin: it must end by itself then. ``bulk`` says
        that more than ``BULK`` will travel, which is worth a slower start.

        Raises:
            UnreachableError: no connection.
        """

    def close(self) -> None:
        """Close the connection; calling it twice is fine."""


def sendable(argv: Sequence[str]) -> Sequence[str]:
    """The command as it is.

    Raises:
        TransportError: it can't be sent to a host.
    """
    if any("\0" in word for word in argv):
        raise TransportError("a command's argument holds a NUL character, which no host can be given")
    return argv


def shown(argv: Sequence[str], limit: int = 120) -> str:
    """The command for a message: one line, printable, not too long."""
    line = printable(shlex.join(argv))
    return line if len(line) <= limit else line[:limit] + "..."
