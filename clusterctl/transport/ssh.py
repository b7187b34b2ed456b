"""A host over SSH, with the same `ssh_config` and `known_hosts` that plain ``ssh -F`` reads.

One connection is kept and each command gets a channel of its own. Only our key and our known_hosts count: no
agent, no keys of the user's, no trust on first use.
"""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from clusterctl.errors import KeyRefusedError, TransportError
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    SILENCE_S,
    Conversation,
    failed,
    no_answer,
    quoted,
    shown,
    unreachable,
    watched,
)
from clusterctl.transport.target import ProxySocket, Reject, Target, paramiko, wrong_key
from clusterctl.util.process import Result, under_subreaper

# Without a handler, paramiko's background thread would write to the user's terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_CHUNK = 1 << 16
_WINDOW = 1 << 23  # bytes the host may send ahead of us; paramiko's default slows down large outputs
_STDERR_TAIL = 1 << 16
_DEAD_AFTER_MS = 60_000
_HEARTBEAT_S = 15.0  # between two requests that the host has to answer
_PATIENCE_S = 60.0  # a node may be busy: many local ones boot on few cores
Socket = socket.socket | ProxySocket
_SETTLE_S = 1.0


@dataclass(slots=True, eq=False)
class SSHTransport:
    """One host of an `ssh_config`, as ``user`` (default: the one the file names); see ``Transport``.

    ``max_output`` bounds the bytes of stdout, and of stderr, that ``run`` keeps. ``heartbeat_s``: how often
    the host has to show that it lives, and how long it may take for that.
    """

    host: str
    config: Path
    _: KW_ONLY
    user: str | None = None
    connect_timeout_s: float = 10.0
    heartbeat_s: tuple[float, float] = (_HEARTBEAT_S, _PATIENCE_S)
    max_output: int = 64 << 20
    silence_s: float = SILENCE_S
    _client: paramiko.SSHClient | None = field(default=None, init=False)
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
        channel = self._start(watched(argv, env) if stdin is None else quoted(argv, env), timeout_s)
        stderr = _Reader(channel.recv_stderr, self.max_output)
        writer = threading.Thread(target=_feed, args=(channel, stdin), daemon=True)
        writer.start()
        try:
            stdout = self._read_all(channel, argv, deadline)
            rc = self._status(channel, argv, deadline)
            said = stderr.result(deadline)
        except TimeoutError as exc:
            raise no_answer(self.host, argv, timeout_s) from exc
        finally:
            _close(channel)
            writer.join()
        result = Result(rc, stdout.decode(errors="replace"), said.decode(errors="replace"))
        if check and rc != 0:
            raise failed(self.host, argv, rc, result.stderr)
        return result

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        with self._talk(argv, watched(argv), self.silence_s) as talk:
            while chunk := talk.receive():
                yield chunk
            talk.ended()

    def converse(
        self, argv: Sequence[str], *, bulk: bool = False, silence_s: float | None = None
    ) -> AbstractContextManager[Conversation]:
        silence_s = silence_s or self.silence_s
        if not (bulk and shutil.which("ssh")):
            return self._talk(argv, quoted(argv), silence_s)
        from clusterctl.transport.openssh import OpenSSH, talking  # noqa: PLC0415 - only for much data

        self._connected()  # which says better than ssh what is wrong
        # ssh ciphers in C, on a core of its own: it moves several times as much in a second as a channel of
        # paramiko's. It takes 0.1 s more to begin, since it logs in again.
        words = OpenSSH(self.config, self.user).argv(self.host, argv, "-T", "-o", "BatchMode=yes")
        return talking(under_subreaper(words), silence_s=silence_s, remote=(self.host, argv))

    def begin(self, argv: Sequence[str]) -> None:
        """It would have to connect."""

    @contextmanager
    def _talk(self, argv: Sequence[str], command: str, silence_s: float) -> Iterator[_Talk]:
        channel = self._start(command, self.connect_timeout_s)
        channel.settimeout(silence_s)
        try:
            yield _Talk(self, channel, argv)
        finally:
            _close(channel)

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _start(self, command: str, timeout_s: float) -> paramiko.Channel:
        transport = self._connected()
        try:
            channel = transport.open_session(window_size=_WINDOW, timeout=timeout_s)
            channel.settimeout(timeout_s)
            channel.exec_command(command)
        except (paramiko.SSHException, OSError, EOFError) as exc:
            raise unreachable(self.host, self.config, "the connection broke", exc) from exc
        return channel

    def _read_all(self, channel: paramiko.Channel, argv: Sequence[str], deadline: float) -> bytes:
        said = bytearray()
        while len(said) <= self.max_output:
            channel.settimeout(max(0.0, deadline - time.monotonic()))
            if not (chunk := channel.recv(_CHUNK)):
                return bytes(said)
            said += chunk
        what = f"`{shown(argv)}` said more than {self.max_output} bytes"
        raise TransportError(what, code="connection-failed", where=self.host, host=self.host)

    def _status(self, channel: paramiko.Channel, argv: Sequence[str], deadline: float) -> int:
        """The exit status, or ENDED_BY_SIGNAL; raises TimeoutError if there is none by ``deadline``."""
        if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        if channel.exit_status == ENDED_BY_SIGNAL:
            transport = channel.get_transport()
            transport.join(_SETTLE_S)  # it closes its channels just before it says itself that it is dead
            if not transport.is_active():
                raise unreachable(
                    self.host, self.config, f"the connection broke during `{shown(argv)}`", None
                )
        return channel.exit_status

    def _connected(self) -> paramiko.Transport:
        """The live connection, made or made anew when needed."""
        with self._lock:
            if self._client is not None:
                transport = self._client.get_transport()
                if transport is not None and transport.is_active():
                    return transport
                self._client.close()
                self._client = None
            self._client = self._connect()
            transport = self._client.get_transport()
            assert transport is not None  # noqa: S101  # paramiko's own invariant after connect()
            return transport

    def _connect(self) -> paramiko.SSHClient:
        target = Target.read(self.config, self.host, self.user)
        client = paramiko.SSHClient()
        sock: Socket | None = None

        def give_up() -> None:
            client.close()
            if sock is not None:  # paramiko, which failed early, may not have closed it
                sock.close()

        try:
            sock = self._socket(target)
            self._open(client, target, sock)
        except paramiko.BadHostKeyException as exc:
            give_up()
            raise wrong_key(self.host, target.known_hosts, exc) from exc
        except paramiko.AuthenticationException as exc:
            transport = client.get_transport()
            answered = transport is not None and transport.is_active()
            give_up()
            if not answered:  # as sshd does on a host that still boots, whose PAM lets nobody in yet
                raise unreachable(
                    self.host, self.config, "the connection broke during the login", exc
                ) from exc
            raise self._refused(target, exc) from exc
        except (paramiko.SSHException, OSError, EOFError) as exc:
            give_up()
            said = sock.said if isinstance(sock, ProxySocket) else ""
            what = f"no SSH connection to {target.address}:{target.port}"
            raise unreachable(self.host, self.config, what, said or exc) from exc
        except BaseException:
            give_up()
            raise
        return client

    def _open(self, client: paramiko.SSHClient, target: Target, sock: socket.socket | ProxySocket) -> None:
        timeout_s = self.connect_timeout_s
        if target.proxy_command is not None:  # has to start first, and may say how long that takes
            timeout_s = max(timeout_s, target.connect_timeout_s or 0)
        client.set_missing_host_key_policy(Reject(target.known_hosts))
        for name, key in target.host_keys().items():
            client.get_host_keys().add(target.alias, name, key)
        client.connect(
            target.alias,  # with a socket given, this is only the name that known_hosts is asked for
            username=target.user,
            key_filename=target.key,
            sock=sock,  # type: ignore[arg-type]  # a proxy's is like one
            timeout=timeout_s,
            banner_timeout=timeout_s,
            auth_timeout=timeout_s,
            allow_agent=False,
            look_for_keys=False,
        )
        transport = client.get_transport()
        if transport is not None:
            name, given = f"heartbeat of {transport.name}", (transport, *self.heartbeat_s)
            threading.Thread(target=_beat, args=given, name=name, daemon=True).start()

    def _socket(self, target: Target) -> Socket:
        if target.proxy_command is not None:
            return ProxySocket(target.proxy_command)
        sock = socket.create_connection((target.address, target.port), timeout=self.connect_timeout_s)
        # The kernel ends a connection whose peer vanished silently, and refuses what we send then.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)
        return sock

    def _refused(self, target: Target, exc: Exception) -> KeyRefusedError:
        what = f"{self.host} does not accept our key for user {target.user}"
        fix = "run `clusterctl up` again, which puts the key there"
        return KeyRefusedError(what, where=target.key, why=str(exc), fix=fix, host=self.host)


def _close(channel: paramiko.Channel) -> None:
    """Close a channel, also where the peer, to which paramiko writes that, has gone."""
    with suppress(OSError, EOFError):
        channel.close()


class _Talk:
    """See ``Conversation``."""

    def __init__(self, transport: SSHTransport, channel: paramiko.Channel, argv: Sequence[str]) -> None:
        self._transport = transport
        self._channel = channel
        self._argv = argv
        self._stderr = _Reader(channel.recv_stderr, _STDERR_TAIL)

    def send(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except TimeoutError as exc:
            raise no_answer(self._transport.host, self._argv, self._channel.gettimeout() or 0) from exc
        except (OSError, EOFError) as exc:  # it has ended, or the connection has
            self.finish()
            what = f"`{shown(self._argv)}` ended too soon"
            raise unreachable(self._transport.host, self._transport.config, what, exc) from exc

    def receive(self) -> bytes:
        try:
            return self._channel.recv(_CHUNK)
        except TimeoutError as exc:
            raise no_answer(self._transport.host, self._argv, self._channel.gettimeout() or 0) from exc

    def finish(self) -> None:
        with suppress(OSError, EOFError):  # as in `_close`
            self._channel.shutdown_write()
        while self.receive():
            pass
        self.ended()

    def ended(self) -> None:
        """Raises unless the command, whose stdout is at its end, exits with 0."""
        host, patience_s = self._transport.host, self._transport.connect_timeout_s
        deadline = time.monotonic() + patience_s
        try:
            rc = self._transport._status(self._channel, self._argv, deadline)
            if rc != 0:
                raise failed(host, self._argv, rc, self._stderr.result(deadline).decode(errors="replace"))
        except TimeoutError as exc:
            raise no_answer(host, self._argv, patience_s) from exc


class _Reader(threading.Thread):
    """Drains one stream of a channel, so that the other one can't stall; keeps the last ``limit`` bytes."""

    def __init__(self, recv: Callable[[int], bytes], limit: int) -> None:
        super().__init__(daemon=True)
        self._recv = recv
        self._limit = limit
        self._kept = bytearray()
        self.start()

    def run(self) -> None:
        while True:
            try:
                chunk = self._recv(_CHUNK)
            except TimeoutError:  # the channel's timeout is for stdout's reader; here it means: nothing yet
                continue
            if not chunk:
                return
            self._kept += chunk
            del self._kept[: -self._limit]

    def result(self, deadline: float) -> bytes:
        """All that was kept; raises TimeoutError if the stream is still open at ``deadline``."""
        self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            raise TimeoutError
        return bytes(self._kept)


def _feed(channel: paramiko.Channel, data: bytes | None) -> None:
    """Write a command's stdin. A command that doesn't read it all is its own affair, hence no error."""
    if data is None:  # the end of its stdin would end the command
        return
    sent = 0
    with suppress(OSError, EOFError):
        while sent < len(data) and not channel.closed:
            try:
                sent += channel.send(data[sent : sent + _CHUNK])
            except TimeoutError:  # the channel's timeout is for stdout's reader
                continue
        channel.shutdown_write()


def _beat(transport: paramiko.Transport, every_s: float, patience_s: float) -> None:
    """Close the connection, as if it broke, once a request has gone without an answer for that long.

    TCP alone does not tell: the kernel of a host whose sshd is frozen, or starved, goes on to acknowledge.
    """
    while transport.is_active():
        transport.join(every_s)  # it ends when the connection does
        impatient = threading.Timer(patience_s, transport.close)
        impatient.daemon = True
        impatient.start()
        try:
            transport.global_request("keepalive@openssh.com", wait=True)  # refused, which is an answer
        except (paramiko.SSHException, OSError, EOFError):
            return  # it broke by itself
        finally:
            impatient.cancel()
