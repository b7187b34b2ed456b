"""The bytes that a command on the cluster says, taken in the amounts that were announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from clusterctl.errors import ClusterctlError
from clusterctl.transport.base import Conversation


class Incoming:
    """Reads a conversation. An end that comes too soon is ``too_little``, unless the command failed."""

    def __init__(self, talk: Conversation, too_little: Callable[[], ClusterctlError]) -> None:
        self._talk = talk
        self._too_little = too_little
        self._buffer = memoryview(b"")

    def exactly(self, size: int) -> bytes:
        """So many bytes."""
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """So many bytes, as they come."""
        while size:
            self._fill()
            piece, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(piece)
            yield piece

    def line(self) -> bytes:
        """The bytes up to the next line feed, which is dropped."""
        parts = []
        while True:
            self._fill()
            head, found, _ = bytes(self._buffer).partition(b"\n")
            parts.append(head)
            self._buffer = self._buffer[len(head) + len(found) :]
            if found:
                return b"".join(parts)

    def more(self) -> bool:
        """Whether anything is left; waits for the end if nothing is."""
        return bool(self._buffer) or self._talk.receive() != b""

    def _fill(self) -> None:
        if not self._buffer:
            self._buffer = memoryview(self._talk.receive())
        if not self._buffer:
            self._talk.finish()  # which may know why
            raise self._too_little()
