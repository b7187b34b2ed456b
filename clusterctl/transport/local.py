"""Commands on this machine, if it is a login node of an attached cluster. They need no SSH."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.transport.commands import CommandTransport
from clusterctl.transport.login import here_words
from clusterctl.transport.openssh import Talk, prepare_pipes


@dataclass(slots=True, eq=False)
class LocalTransport(CommandTransport):
    """Transport to this machine (see ``Transport``), as this user.

    A command has a session of its own. It ends as it would over SSH: when its stdin or stdout is closed.
    """

    _running: set[subprocess.Popen[bytes]] = field(default_factory=set, init=False)

    def begin(self, argv: Sequence[str]) -> None:
        """Start nothing early, because no connection is needed."""

    def close(self) -> None:
        for process in list(self._running):
            _close(process)

    @contextmanager
    def _talk(self, argv: Sequence[str], line: str, silence_s: float) -> Iterator[Talk]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            here_words(line),
            bufsize=0,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            # As sshd does.
            cwd=Path.home(),
            start_new_session=True,
        )
        prepare_pipes(process)
        self._running.add(process)
        try:
            yield Talk(self.host, argv, process, silence_s, is_wrapped=True)
        finally:
            self._running.discard(process)
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close a command's streams, at which it ends by itself. Do not wait for its end."""
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        stream.close()
    if process.poll() is None:
        threading.Thread(target=process.wait, daemon=True).start()
