"""Hosts over SSH: the ssh program runs each command, and reads the `ssh_config` that plain ``ssh -F`` reads.

Commands share a connection (master.py). Only our key and our known_hosts count: no agent, no keys of the
user's, no trust on first use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import TransportError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    SILENCE_S,
    Conversation,
    Transport,
    failed,
    shown,
    unreachable,
    wrapped,
)
from clusterctl.transport.master import Master, open_master, refusal
from clusterctl.transport.openssh import NO_CONNECTION, OpenSSH, Talk, running
from clusterctl.util.process import Result

if TYPE_CHECKING:
    import subprocess

_SETTLE_S = 1.0


@dataclass(slots=True, eq=False)
class SSHTransport:
    """One host of an `ssh_config`, as ``user`` (default: the one the file names); see ``Transport``.

    ``stays``: the connection is left open for the next verb. ``max_output`` bounds the bytes of stdout that
    ``run`` keeps, and those of stderr that it returns.
    """

    host: str
    config: Path
    _: KW_ONLY
    user: str | None = None
    stays: bool = False
    max_output: int = 64 << 20
    silence_s: float = SILENCE_S
    _master: Master | None = field(default=None, init=False)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set, init=False)
    _begun: dict[tuple[str, ...], tuple[ExitStack, Talk]] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

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
        line, script = wrapped(argv, env, reads=stdin is not None)
        with self._talk(argv, line, timeout_s) as talk:
            talk.deadline, talk.most_stderr = deadline, self.max_output
            # The end of its stdin would end a command that reads none.
            stdout = talk.exchange(script + (stdin or b""), self.max_output, close=stdin is not None)
            rc = talk.status()
            result = Result(rc, stdout.decode(errors="replace"), talk.complaint())
        if check and rc != 0:
            raise failed(self.host, argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        line, script = wrapped(argv, reads=False)
        with self._talk(argv, line, self.silence_s) as talk:
            talk.send(script)
            while chunk := talk.receive():
                yield chunk
            talk.ended()

    def begin(self, argv: Sequence[str]) -> None:
        with self._lock:
            if self.stays and self._master is None and _may_stay(self.config):
                self._master = open_master(self.config, self.host, self.user, stays=True, start=False)
            if self._master is None or self._master.has_ended():
                return
        with suppress(TransportError), ExitStack() as stack:
            talk = stack.enter_context(self._conversation(argv, self.silence_s))
            self._begun[tuple(argv)] = (stack.pop_all(), talk)

    @contextmanager
    def converse(self, argv: Sequence[str], *, silence_s: float | None = None) -> Iterator[Conversation]:
        stack, talk = self._begun.pop(tuple(argv), (ExitStack(), None))
        with stack:
            if talk is not None and talk.process.poll() is None:
                talk.silence_s = silence_s or self.silence_s
                yield talk
                return
        with self._conversation(argv, silence_s or self.silence_s) as talk:
            yield talk

    def close(self) -> None:
        for stack, _ in self._begun.values():
            stack.close()
        self._begun.clear()
        for process in list(self._running):
            process.kill()
        with self._lock:
            if self._master is not None:
                self._master.close()
            self._master = None

    @contextmanager
    def _conversation(self, argv: Sequence[str], silence_s: float) -> Iterator[Talk]:
        line, script = wrapped(argv)
        with self._talk(argv, line, silence_s) as talk:
            talk.send(script)
            yield talk

    @contextmanager
    def _talk(self, argv: Sequence[str], line: str, silence_s: float) -> Iterator[Talk]:
        """Start ssh, which runs a line of the login shell over the shared connection."""
        master = self._connected()
        # ssh connects by itself if the host takes no more sessions over a connection.
        options = ("-S", f"./{master.name}" if master else "none", "-T", "-o", "BatchMode=yes")
        words = OpenSSH(self.config, self.user).argv(self.host, line, *options)
        with running(words, cwd=master.folder if master else None, is_ssh=True) as process:
            self._running.add(process)
            try:
                yield _Command(self.host, argv, process, silence_s, is_wrapped=True, ssh=self, master=master)
            finally:
                self._running.discard(process)

    def _connected(self) -> Master | None:
        """Return the connection, opened if it is not; None if the next command has to connect by itself."""
        with self._lock:
            if self._master is not None and self._master.has_ended():
                self._master.close()
                self._master = None
            if self._master is None:
                stays = self.stays and _may_stay(self.config)
                self._master = open_master(self.config, self.host, self.user, stays=stays)
            return self._master


@dataclass(slots=True, kw_only=True)
class _Command(Talk):
    """A command on a host; ``master`` is the connection that it shares."""

    ssh: SSHTransport
    master: Master | None

    def _status(self, rc: int) -> int:
        """ssh says by 255 that it has no exit status: a signal ended the command, or the connection broke.

        If the command itself exits with 255, it is taken for one that a signal ended.
        """
        ended_here = rc == ENDED_BY_SIGNAL
        if rc != NO_CONNECTION and not ended_here:
            return rc
        if self.is_wrapped:
            # The command has not begun, so it is ssh that says why.
            raise refusal(self.host, self.ssh.config, self.complaint(), self.ssh.user)
        if ended_here or self.master is None or self.master.has_ended(_SETTLE_S):
            what = f"the connection broke during `{shown(self.argv)}`"
            raise unreachable(self.host, self.ssh.config, what, self.complaint())
        return ENDED_BY_SIGNAL


def _may_stay(config: Path) -> bool:
    """Return whether connections are left open for the next verb.

    A cluster that takes itself down when it is idle is not idle as long as somebody is connected.
    """
    workspace = Workspace(config.parent)
    try:
        return not workspace.removing.exists() and b"auto_down" not in workspace.spec.read_bytes()
    except FileNotFoundError:
        return True


class Connections(ExitStack):
    """The hosts of an `ssh_config`. As a context manager it closes them all.

    The connection to the host ``stays`` is left open for the next verb.
    """

    def __init__(self, ssh_config: Path, *, stays: str | None = None) -> None:
        super().__init__()
        self._ssh_config = ssh_config
        self._stays = stays
        self._open: dict[tuple[str, str | None], Transport] = {}
        self._lock = threading.Lock()

    def to(self, host: str, user: str | None = None) -> Transport:
        """Return the connection to a host of that name, as this user (default: the admin user)."""
        with self._lock:
            if (host, user) not in self._open:
                stays = host == self._stays
                self._open[host, user] = SSHTransport(host, self._ssh_config, user=user, stays=stays)
                self.callback(self._open[host, user].close)
            return self._open[host, user]
