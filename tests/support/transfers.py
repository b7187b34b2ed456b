"""Contents of folders, and connections that break, for tests of transfers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from clusterctl.errors import CommandError, UnreachableError
from clusterctl.transport.base import Conversation
from tests.support.local_transport import LocalTransport


def content(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            what: object = os.readlink(path)
        else:
            what = None if path.is_dir() else path.read_bytes()
        mtime = 0 if path.is_symlink() else status.st_mtime_ns
        found[str(path.relative_to(folder))] = (
            what,
            0 if path.is_symlink() else status.st_mode,
            mtime,
        )
    return found


class Cutting(LocalTransport):
    """The connection breaks after so many bytes, either way. What was sent by then arrives."""

    def __init__(self, after: int) -> None:
        self.left = after

    @contextmanager
    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> Iterator[Conversation]:
        with super().converse(argv, silence_s=silence_s) as talk:
            yield _Cut(self, talk)


class _Cut:
    def __init__(self, transport: Cutting, talk: Conversation) -> None:
        self._transport = transport
        self._talk = talk
        self.finish = talk.finish

    def send(self, data: bytes) -> None:
        self._talk.send(data[: self._transport.left])
        self._count(data)

    def receive(self) -> bytes:
        data = self._talk.receive()
        self._count(data)
        return data

    def _count(self, data: bytes) -> None:
        self._transport.left -= len(data)
        if self._transport.left < 0:
            with suppress(CommandError):
                self._talk.finish()  # the other side reads what it was sent, and then sees the end
            raise UnreachableError("the connection broke")
