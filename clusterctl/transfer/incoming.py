"""The bytes that a command on the cluster says, taken in the amounts that were announced."""

from __future__ import annotations

from collections.abc import Iterator

from clusterctl.errors import TransferError
from clusterctl.transport.base import Conversation


class Incoming:
    """Reads a conversation; the end that comes too soon is a TransferError, unless the command says more."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
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

    def _fill(self) -> None:
        if not self._buffer:
            self._buffer = memoryview(self._talk.receive())
        if not self._buffer:
            self._talk.finish()  # which may know why
            raise TransferError(
                "the cluster sent less than it said", fix="run it again; what has arrived is kept"
            )
