"""A transport that runs commands on this machine. A subclass may replace paths of a host by local
paths.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from clusterctl.errors import CommandError
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    SILENCE_S,
    Conversation,
    command_error,
    no_answer_error,
)
from clusterctl.transport.openssh import start_conversation
from clusterctl.util.process import Result


class _Talk:
    """A conversation in which paths of the host are replaced by local paths."""

    def __init__(self, transport: LocalTransport, talk: Conversation) -> None:
        self._transport = transport
        self._talk = talk
        self.receive = talk.receive
        self.finish = talk.finish
        self.process = talk.process  # type: ignore[attr-defined]

    def send(self, data: bytes) -> None:
        self._talk.send(self._transport._local_request(data))


class LocalTransport:
    """Runs commands on this machine as this user; see ``Transport``."""

    silence_s = SILENCE_S
    host = "localhost"

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        env = {**os.environ, **(env or {})}
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                self._local_command(argv),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=env,
                start_new_session=True,
            )
        except OSError as exc:
            raise CommandError(f"can't run `{argv[0]}`", rc=127, stderr=str(exc)) from exc
        with process:
            try:
                stdout, stderr = process.communicate(stdin or b"", timeout=timeout_s)
            except subprocess.TimeoutExpired as exc:
                os.killpg(process.pid, signal.SIGKILL)
                raise no_answer_error(self.host, argv, timeout_s) from exc
        rc = max(process.returncode, ENDED_BY_SIGNAL)
        result = Result(rc, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        if check and rc != 0:
            raise command_error(self.host, argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        with start_conversation(
            self._local_command(argv), stdin=subprocess.DEVNULL, silence_s=self.silence_s
        ) as talk:
            while chunk := talk.receive():
                yield chunk
            talk.finish()

    @contextmanager
    def converse(
        self,
        argv: Sequence[str],
        *,
        silence_s: float | None = None,
    ) -> Iterator[Conversation]:
        with start_conversation(
            self._local_command(argv), silence_s=silence_s or self.silence_s
        ) as talk:
            yield _Talk(self, talk)

    def begin(self, argv: Sequence[str]) -> None:
        """Nothing is begun ahead; see ``Transport.begin``."""

    def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Nothing stays open here."""

    def _local_command(self, argv: Sequence[str]) -> Sequence[str]:
        """Return the command with local paths. A script gets no name as `$0`, as on a host."""
        is_script = tuple(argv[:2]) == ("sh", "-c")
        return [*argv[:3], "sh", *argv[4:]] if is_script else argv

    def _local_request(self, data: bytes) -> bytes:
        """Return what a conversation sends, with local paths."""
        return data
