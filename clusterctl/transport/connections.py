"""The hosts of an `ssh_config`, and over which connection each is asked.

Verbs that ask one host for little share a connection that outlives each of them (multiplex.py). What that
can't do, and every error of connecting, is paramiko's (ssh.py).
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import TransportError
from clusterctl.transport.base import (
    SILENCE_S,
    Conversation,
    Transport,
    failed,
    no_answer,
    quoted,
    shown,
    unreachable,
    watched,
)
from clusterctl.transport.multiplex import Master, MayHaveRunError, Session, kept
from clusterctl.transport.openssh import Talk
from clusterctl.util.process import Result

if TYPE_CHECKING:
    from clusterctl.transport.ssh import SSHTransport

_CHUNK = 1 << 16


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
        """The connection to a host of that name, as this user (default: the admin user)."""
        with self._lock:
            if (host, user) not in self._open:
                self._open[host, user] = self._made(host, user)
                self.callback(self._open[host, user].close)
            return self._open[host, user]

    def _made(self, host: str, user: str | None) -> Transport:
        if host == self._stays:
            return PersistentSSH(host, self._ssh_config, user=user)
        from clusterctl.transport.ssh import SSHTransport  # noqa: PLC0415 - paramiko is 0.1 s of a verb

        return SSHTransport(host, self._ssh_config, user=user)


@dataclass(slots=True, eq=False)
class PersistentSSH:
    """One host of an `ssh_config`, over a connection that outlives us; see ``Transport``.

    ``max_output`` bounds the bytes of stdout that ``run`` keeps, and those of stderr that it returns.
    """

    host: str
    config: Path
    _: KW_ONLY
    user: str | None = None
    connect_timeout_s: float = 10.0
    max_output: int = 64 << 20
    silence_s: float = SILENCE_S
    _master: Master | None = field(default=None, init=False)
    _begun: dict[str, Session] = field(default_factory=dict, init=False)
    _own: SSHTransport | None = field(default=None, init=False)  # from the first time that one is needed
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
        session = self._session(watched(argv, env) if stdin is None else quoted(argv, env))
        if session is None:
            return self._by_itself().run(argv, stdin=stdin, timeout_s=timeout_s, check=check, env=env)
        with closing(session):
            try:
                said = self._exchange(session, argv, stdin, deadline)
                rc = session.wait(deadline - time.monotonic())
            except TimeoutError as exc:
                raise no_answer(self.host, argv, timeout_s) from exc
            except ConnectionError as exc:
                what = f"the connection broke during `{shown(argv)}`"
                raise unreachable(self.host, self.config, what) from exc
            result = Result(rc, said.decode(errors="replace"), session.complaint())
        if check and rc != 0:
            raise failed(self.host, argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        session = self._session(watched(argv))
        if session is None:
            yield from self._by_itself().stream(argv)
            return
        with closing(session):
            talk = Talk(self.host, argv, session, session.complaint, self.silence_s)
            while chunk := talk.receive():
                yield chunk
            talk.ended()

    def begin(self, argv: Sequence[str]) -> None:
        with self._lock, suppress(OSError, MayHaveRunError):  # one that has run reads no stdin, and ends
            if self._own is None and self._master is None:
                self._master = kept(self.config, self.host, self.user, start=False)
            if self._master is not None:
                command = quoted(argv)
                self._begun[command] = self._master.session(command, self.max_output)

    @contextmanager
    def converse(
        self, argv: Sequence[str], *, bulk: bool = False, silence_s: float | None = None
    ) -> Iterator[Conversation]:
        silence_s = silence_s or self.silence_s
        session = self._begun_session(quoted(argv)) or self._session(quoted(argv))
        if session is None:
            with self._by_itself().converse(argv, bulk=bulk, silence_s=silence_s) as talk:
                yield talk
            return
        with closing(session):
            yield Talk(self.host, argv, session, session.complaint, silence_s)

    def close(self) -> None:
        with self._lock:
            if self._master is not None:
                self._master.close()
            for session in self._begun.values():
                session.close()
            self._begun.clear()
            if self._own is not None:
                self._own.close()
            self._master = self._own = None

    def _begun_session(self, command: str) -> Session | None:
        """The command that ``begin`` has started, if its connection still stands."""
        with self._lock:
            session = self._begun.pop(command, None)
            if session is None or (self._master is not None and not self._master.has_ended()):
                return session
        session.close()
        return None

    def _session(self, command: str) -> Session | None:
        """The command, which runs over the shared connection; None where it does not."""
        begun = time.monotonic()
        with self._lock:
            if self._own is not None:
                return None
            if self._master is not None and self._master.has_ended():
                self._master.close()
                self._master = None
            self._master = master = self._master or kept(self.config, self.host, self.user)
        if master is not None:
            try:
                with suppress(OSError):  # it takes no more sessions, or has just ended
                    return master.session(command, self.max_output)
            except MayHaveRunError as exc:
                raise unreachable(self.host, self.config, "the connection stood still") from exc
        self._by_itself(self.connect_timeout_s - (time.monotonic() - begun))
        return None

    def _by_itself(self, left_s: float = math.inf) -> SSHTransport:
        """A connection of our own. A host that was silent for long already has little time ``left_s``."""
        from clusterctl.transport.ssh import SSHTransport  # noqa: PLC0415 - as above

        with self._lock:
            self._own = self._own or SSHTransport(
                self.host,
                self.config,
                user=self.user,
                connect_timeout_s=min(self.connect_timeout_s, max(1.0, left_s)),
                max_output=self.max_output,
                silence_s=self.silence_s,
            )
            return self._own

    def _exchange(self, session: Session, argv: Sequence[str], stdin: bytes | None, deadline: float) -> bytes:
        """The stdout of a command. Meanwhile it gets its stdin, which it need not read to the end."""
        said, left, output = bytearray(), memoryview(stdin or b""), session.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        if left:
            os.set_blocking(session.stdin.fileno(), False)
            poll.register(session.stdin, select.POLLOUT)
        elif stdin is not None:
            session.stdin.close()
        while len(said) <= self.max_output:
            if not (ready := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
                raise TimeoutError
            for fd, _ in ready:
                if fd == output:
                    if not (chunk := os.read(fd, _CHUNK)):
                        return bytes(said)
                    said += chunk
                    continue
                try:
                    left = left[os.write(fd, left[:_CHUNK]) :]
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    poll.unregister(fd)
                    session.stdin.close()
        what = f"`{shown(argv)}` said more than {self.max_output} bytes"
        raise TransportError(what, code="connection-failed", where=self.host, host=self.host)
