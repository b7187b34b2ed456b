"""How a command reaches a host. Commands are argv lists; whatever reaches a remote shell is quoted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished command said."""

    rc: int
    stdout: str
    stderr: str


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

        Raises:
            CommandError: it exited non-zero and ``check`` is set.
            UnreachableError: no connection, or no answer within ``timeout_s``.
        """

    def stream(self, argv: Sequence[str]) -> Iterator[bytes]:
        """Run a command and yield its stdout as it comes, until it ends or the iterator is closed.

        Raises:
            CommandError: it exited non-zero.
            UnreachableError: the connection broke.
        """

    def close(self) -> None:
        """Close the connection; calling it twice is fine."""
