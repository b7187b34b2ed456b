"""This machine as a host."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager

from clusterctl.errors import CommandError
from clusterctl.transport.base import ENDED_BY_SIGNAL, SILENCE_S, Conversation, failed, no_answer
from clusterctl.transport.openssh import talking
from clusterctl.util.process import Result


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
        env, pipe = {**os.environ, **(env or {})}, subprocess.PIPE
        try:
            process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
            )
        except OSError as exc:
            raise CommandError(f"can't run `{argv[0]}`", rc=127, stderr=str(exc)) from exc
        with process:
            try:
                stdout, stderr = process.communicate(stdin or b"", timeout=timeout_s)
            except subprocess.TimeoutExpired as exc:
                os.killpg(process.pid, signal.SIGKILL)
                raise no_answer(self.host, argv, timeout_s) from exc
        rc = max(process.returncode, ENDED_BY_SIGNAL)
        result = Result(rc, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        if check and rc != 0:
            raise failed(self.host, argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        with talking(argv, stdin=subprocess.DEVNULL, silence_s=self.silence_s) as talk:
            while chunk := talk.receive():
                yield chunk
            talk.finish()

    def converse(
        self,
        argv: Sequence[str],
        *,
        bulk: bool = False,  # noqa: ARG002  # there is no connection
        silence_s: float | None = None,
    ) -> AbstractContextManager[Conversation]:
        return talking(argv, silence_s=silence_s or self.silence_s)

    def begin(self, argv: Sequence[str]) -> None:
        """Nothing is begun ahead; see ``Transport.begin``."""

    def close(self) -> None:
        pass
