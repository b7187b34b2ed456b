"""Commands on a host, through any program that runs a line of its login shell: ssh, or the shell itself."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass

from clusterctl.transport.base import SILENCE_S, Conversation, command_error, wrap_command
from clusterctl.transport.openssh import Talk
from clusterctl.util.process import Result


@dataclass(slots=True, eq=False)
class CommandTransport(ABC):
    """The part of a ``Transport`` that ``_talk`` does not decide.

    max_output: maximum number of bytes of stdout that ``run`` accepts, and of stderr that it returns.
    """

    host: str
    _: KW_ONLY
    max_output: int = 64 << 20
    silence_s: float = SILENCE_S

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        deadline = time.monotonic() + timeout_s
        line, script = wrap_command(argv, env, reads=stdin is not None)
        with self._talk(argv, line, timeout_s) as talk:
            talk.deadline, talk.most_stderr = deadline, self.max_output
            # If the command reads no stdin, closing stdin would end it.
            stdout = talk.exchange(script + (stdin or b""), self.max_output, close=stdin is not None)
            rc = talk.status()
            result = Result(rc, stdout.decode(errors="replace"), talk.stderr_tail())
        if check and rc != 0:
            raise command_error(self.host, argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        with self._conversation(argv, self.silence_s, reads=False) as talk:
            while chunk := talk.receive():
                yield chunk
            talk.raise_unless_succeeded()

    @contextmanager
    def converse(self, argv: Sequence[str], *, silence_s: float | None = None) -> Iterator[Conversation]:
        with self._conversation(argv, silence_s or self.silence_s) as talk:
            yield talk

    @contextmanager
    def _conversation(self, argv: Sequence[str], silence_s: float, *, reads: bool = True) -> Iterator[Talk]:
        line, script = wrap_command(argv, reads=reads)
        with self._talk(argv, line, silence_s) as talk:
            talk.send(script)
            yield talk

    @abstractmethod
    def _talk(self, argv: Sequence[str], line: str, silence_s: float) -> AbstractContextManager[Talk]:
        """Run ``line``, made of ``argv`` by ``wrap_command``, in a login shell of the host."""
