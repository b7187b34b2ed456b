"""The bytes that a command on the cluster says, taken in the amounts that were announced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from clusterctl.errors import ClusterctlError
from clusterctl.transport.base import Conversation
from clusterctl.transport.remote_send import HEADER, ZEROS

_LONGEST = 1 << 20  # bytes of a line


def lines(stream: Iterable[bytes], too_long: Exception) -> Iterator[bytes]:
    """The lines of a stream, as soon as they are whole, without their ends.

    Raises:
        Exception: ``too_long``, if one does not end.
    """
    rest = b""
    for piece in stream:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > _LONGEST:
            raise too_long


class Incoming:
    """Reads a conversation. An end that comes too soon is ``too_little``, unless the command failed; data
    that the other side did not announce is ``other``.
    """

    def __init__(
        self,
        talk: Conversation,
        too_little: Callable[[], ClusterctlError],
        other: Callable[[], ClusterctlError],
    ) -> None:
        self._talk = talk
        self._too_little, self._other = too_little, other
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
        parts: list[bytes] = []
        while sum(map(len, parts)) <= _LONGEST:
            self._fill()
            head, found, _ = bytes(self._buffer).partition(b"\n")
            parts.append(head)
            self._buffer = self._buffer[len(head) + len(found) :]
            if found:
                return b"".join(parts)
        raise self._too_little()

    def number(self) -> int:
        """The next eight bytes."""
        return int(HEADER.unpack(self.exactly(HEADER.size))[0])

    def content(self, fd: int, size: int, sha: Any) -> Iterator[int]:
        """Write so many bytes of a file as ``send_content`` sends them, and hash them; yields how many, as
        they come. What is zeros becomes a hole: the file's size is for the caller to set.

        Raises:
            ClusterctlError: ``other``, if it is more than that.
        """
        while size:
            length = self.number()
            if abs(length) > size:
                raise self._other()
            size -= abs(length)
            for done in range(0, -length, len(ZEROS)):
                sha.update(ZEROS[: -length - done])
            if length < 0:
                os.lseek(fd, -length, os.SEEK_CUR)
                yield -length
            for piece in self.pieces(max(0, length)):
                sha.update(piece)
                _write(fd, piece)
                yield len(piece)

    def last(self, size: int) -> bytes:
        """What follows a file's content: one piece of so many bytes.

        Raises:
            ClusterctlError: ``other``, if it is of another size.
        """
        while (length := self.number()) == 0:  # a sign of life
            pass
        if length != size:
            raise self._other()
        return self.exactly(size)

    def more(self) -> bool:
        """Whether anything is left; waits for the end if nothing is."""
        return bool(self._buffer) or self._talk.receive() != b""

    def _fill(self) -> None:
        if not self._buffer:
            self._buffer = memoryview(self._talk.receive())
        if not self._buffer:
            self._talk.finish()  # which may know why
            raise self._too_little()


def _write(fd: int, data: memoryview) -> None:
    if data == ZEROS[: len(data)]:
        os.lseek(fd, len(data), os.SEEK_CUR)  # a hole
        return
    while data:
        data = data[os.write(fd, data) :]
