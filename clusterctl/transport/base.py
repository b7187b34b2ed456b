"""Transports run commands on hosts. Commands are argv lists; whatever reaches a remote shell is quoted."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from clusterctl.errors import NoAnswerError, TransportError, printable

BULK = 16 << 20  # bytes that are worth a connection of their own
LONGEST_LINE = 1 << 20  # bytes of an answer
SILENCE_S = 120.0  # after which a command that should stream is given up


@dataclass(frozen=True, slots=True)
class Result:
    """Exit status and output of a finished command."""

    rc: int
    stdout: str
    stderr: str


class Conversation(Protocol):
    """A running command that is written to and read from. It must not say much while it is written to."""

    def send(self, data: bytes) -> None:
        """Write to its stdin; waits while it does not read.

        Raises:
            CommandError: it has ended.
            NoAnswerError: it took no byte for too long.
            UnreachableError: the connection broke.
        """

    def receive(self) -> bytes:
        """Some of its stdout, as soon as there is any; b"" at the end of it.

        Raises:
            NoAnswerError: it said no byte for too long.
        """

    def finish(self) -> None:
        """Close its stdin, read its stdout to the end, and wait until it has ended.

        Raises:
            CommandError: it exited non-zero.
            NoAnswerError: it said no byte for too long, or did not end.
            UnreachableError: the connection broke.
        """


class Transport(Protocol):
    """One host, as one user. A command ends with us; one that needs its stdin, when it reads its end.

    A program of ours (``remote_argv``) also ends when its stdout is closed.
    """

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
            NoAnswerError: no answer within ``timeout_s``. What runs with other rights (sudo) may go on.
            UnreachableError: no connection.
        """

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        """Run a command without stdin and yield its stdout as it comes.

        Closing the generator ends the command.

        Raises:
            CommandError: it exited non-zero.
            NoAnswerError: it said no byte for too long.
            UnreachableError: the connection broke.
        """

    def converse(
        self, argv: Sequence[str], *, bulk: bool = False, silence_s: float | None = None
    ) -> AbstractContextManager[Conversation]:
        """Start a command that reads stdin and answers on stdout.

        Leaving the context without ``finish`` closes its stdin: it must end by itself then. ``bulk`` says
        that more than ``BULK`` will travel, which is worth a slower start. After ``silence_s`` seconds
        (default: ``SILENCE_S``) without a byte in either direction it is given up.

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


def no_answer(host: str, argv: Sequence[str], seconds: float) -> NoAnswerError:
    """The error for a command that said nothing, or did not end, for that long."""
    return NoAnswerError(
        f"{host}: no answer from `{shown(argv)}` within {seconds:g} s",
        fix="try again; if it stays so, look at the host's load, "
        "and at what the account's ~/.bashrc there runs at each login",
        host=host,
    )


def lines(stream: Iterable[bytes], too_long: Exception) -> Iterator[bytes]:
    """The lines of a stream, as soon as they are whole, without their ends.

    Raises:
        Exception: ``too_long``, if one does not end.
    """
    rest = b""
    for piece in stream:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > LONGEST_LINE:
            raise too_long
