"""This machine in place of a host: what is run there has other paths here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from clusterctl.transport.base import Conversation
from clusterctl.util.process import Result
from tests.support.here import LocalTransport


class Requests:
    """A conversation that sends something else."""

    def __init__(self, talk: Conversation, changed: Callable[[bytes], bytes]) -> None:
        self.receive, self.finish = talk.receive, talk.finish
        self.send: Callable[[bytes], None] = lambda data: talk.send(changed(data))


class Elsewhere(LocalTransport):
    """A local transport that runs ``_here(argv)`` wherever ``argv`` is asked for."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        return super().run(self._here(argv), stdin=stdin, timeout_s=timeout_s, check=check, env=env)

    @contextmanager
    def converse(
        self, argv: Sequence[str], *, bulk: bool = False, silence_s: float | None = None
    ) -> Iterator[Conversation]:
        with super().converse(self._here(argv), bulk=bulk, silence_s=silence_s) as talk:
            yield Requests(talk, self._request)

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        return super().stream(self._here(argv))

    def _request(self, data: bytes) -> bytes:
        """What a conversation sends, with the paths that it has here."""
        return data

    def _here(self, argv: Sequence[str]) -> list[str]:
        raise NotImplementedError
