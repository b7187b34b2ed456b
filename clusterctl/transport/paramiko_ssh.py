"""SSH by paramiko to hosts that clusterctl made: one connection a host, which ends with the command.

A login takes a tenth of the processor time of a login by an ssh process. Address, key and
known_hosts are those of the `ssh_config`. No host key is trusted on first use.
"""

from __future__ import annotations

import copy
import logging
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import IO, Final, Self

from clusterctl.errors import TransportError
from clusterctl.state.inventory import KEEPALIVE
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    Transport,
    shown_command,
    unreachable_error,
)
from clusterctl.transport.openssh import CommandConversation, process_group_ending_with_us
from clusterctl.transport.refusals import (
    changed_key_error,
    connection_error,
    damaged_key_error,
    entry_of,
    incomplete_config_error,
    refused_key_error,
    unknown_key_error,
)
from clusterctl.transport.ssh import CommandTransport, connect_jump
from clusterctl.util.disk import read_text

# paramiko imports it to run commands in an ssh_config of its own reading, and that takes half of its
# start.
sys.modules.setdefault("invoke", None)  # type: ignore[arg-type]
import paramiko  # noqa: E402

if sys.modules["invoke"] is None:
    del sys.modules["invoke"]

# Time until the host has answered, and until it has let the user in.
_CONNECT_S: Final = 10.0
_LOGIN_S: Final = 75.0
_READ: Final = 1 << 15  # bytes
# paramiko does not tell when the host can take more stdin.
_PAUSE_S: Final = 0.01
_CLOSE_S: Final = 1.0
_WAKE_S: Final = 1.0

# Otherwise paramiko prints its log of failed connections.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(slots=True, eq=False)
class ParamikoTransport(CommandTransport):
    """Transport to a host of an `ssh_config` (see ``Transport``).

    user: account on the host. Default: the user in the `ssh_config`.
    jump_to: returns the transport to a jump host. Default: a new one.
    """

    config: Path
    _: KW_ONLY
    user: str | None = None
    jump_to: Callable[[str], Transport] | None = None
    _ssh: paramiko.Transport | None = field(default=None, init=False)
    _route: _Route | None = field(default=None, init=False)
    _resources: ExitStack = field(default_factory=ExitStack, init=False)
    _failed: tuple[TransportError | None, float] = field(default=(None, 0.0), init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def begin(self, argv: Sequence[str]) -> None:
        """Start nothing early, because a command starts at once over an open connection."""

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        # Another thread may hold the lock while it logs in. This ends its login.
        resources, self._resources = self._resources, ExitStack()
        resources.close()

    @contextmanager
    def _talk(
        self, argv: Sequence[str], line: str, silence_s: float
    ) -> Iterator[CommandConversation]:
        ssh = self._connect()
        try:
            channel = ssh.open_session(timeout=silence_s)
            channel.exec_command(line)
        except (paramiko.SSHException, OSError, EOFError) as exc:
            problem = f"the connection broke before `{shown_command(argv)}`"
            raise unreachable_error(self.host, self.config, problem, exc) from exc
        try:
            yield _ChannelConversation(
                self.host,
                argv,
                silence_s,
                channel=channel,
                is_wrapped=True,
                config=self.config,
            )
        finally:
            with suppress(OSError, EOFError):
                channel.close()

    def _connect(self) -> paramiko.Transport:
        """Return the connection, opened if necessary. Threads that wait for it get the same error."""
        asked = time.monotonic()
        with self._lock:
            error, failed_at = self._failed
            if error is not None and asked < failed_at:
                raise copy.copy(error)
            route = _Route.of(self.host, self.config, self.user)
            if self._ssh is not None and self._ssh.is_active() and self._route == route:
                return self._ssh
            self.close()
            try:
                connect_jump(self.host, self.config, self.jump_to)
                self._ssh = _log_in(self._resources, route)
            except TransportError as exc:
                self.close()
                self._failed = (exc, time.monotonic())
                raise
            self._route = route
            return self._ssh


@dataclass(frozen=True, slots=True)
class _Server:
    """Where an SSH server answers. carrier: the words of the program that carries the connection.
    Empty: none. limit_s: time in which it must greet.
    """

    address: str
    port: int
    carrier: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class _Route:
    """How to log in to a host: what the `ssh_config` and its known_hosts say of it.

    user: account, if it is not that of the `ssh_config`. host_key: `ssh-ed25519 AAAA...`.
    """

    host: str
    config: Path
    user: str | None
    account: str
    server: _Server
    key_file: str
    host_key: str

    @classmethod
    def of(cls, host: str, config: Path, user: str | None) -> Self:
        """Raise HostKeyError if the host's key is not known, TransportError without the host."""
        if not (own := entry_of(host, config)):
            raise incomplete_config_error(host, config)
        entry = {**entry_of("*", config), **own}
        address = entry.get("HostName", host)
        port = entry.get("Port", "22")
        carrier = shlex.split(entry.get("ProxyCommand", ""))
        known_hosts = read_text(Path(entry.get("UserKnownHostsFile", "").strip('"')))
        lines = (line.partition(" ") for line in known_hosts.splitlines())
        if (host_key := next((key for name, _, key in lines if name == host), None)) is None:
            raise unknown_key_error(host, config)
        return cls(
            host=host,
            config=config,
            user=user,
            account=user or entry.get("User", ""),
            server=_Server(
                address,
                int(port),
                tuple(word.replace("%h", address).replace("%p", port) for word in carrier),
                limit_s=float(entry.get("ConnectTimeout", _CONNECT_S)),
            ),
            key_file=entry.get("IdentityFile", "").strip('"'),
            host_key=host_key,
        )

    def private_key(self) -> paramiko.PKey:
        """Read the cluster's private key. Raise KeyRefusedError."""
        try:
            return paramiko.Ed25519Key.from_private_key_file(self.key_file)
        except (OSError, ValueError, paramiko.SSHException) as exc:
            raise damaged_key_error(self.host, self.key_file, str(exc)) from exc


def offered_key(address: str, port: int, carrier: Sequence[str], limit_s: float) -> str:
    """Return the key that a machine offers, as `ssh-ed25519 AAAA...`, without a login.

    The key is not trusted by this. carrier: the words of the program that carries the connection.
    Empty: none. Raises ConnectionError.
    """
    with ExitStack() as stack:
        return _offered(_shake_hands(stack, _Server(address, port, tuple(carrier), limit_s)))


def _log_in(stack: ExitStack, route: _Route) -> paramiko.Transport:
    """Log in with the cluster's key. Closing ``stack`` ends the connection, or the login.

    Raises HostKeyError, KeyRefusedError, UnreachableError, TunnelError and TunnelRefusedError.
    """
    key = route.private_key()
    kind = route.host_key.partition(" ")[0]
    try:
        ssh = _shake_hands(stack, route.server, kind)
        if (offered := _offered(ssh)) != route.host_key:
            raise changed_key_error(route.host, route.config, f"the host offered {offered}")
        _authenticate(ssh, route.account, key)
    except paramiko.AuthenticationException as exc:
        raise refused_key_error(route.host, route.config, route.user, str(exc)) from exc
    except ConnectionError as exc:
        raise connection_error(route.host, route.config, str(exc), route.user) from exc
    return ssh


def _shake_hands(stack: ExitStack, server: _Server, kind: str | None = None) -> paramiko.Transport:
    """Connect to an SSH server, which shows its key. Closing ``stack`` ends the connection.

    kind: of the key. Default: the kind that the server and paramiko prefer. Raises ConnectionError.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as messages:
        try:
            if server.carrier:
                stream, other_end = socket.socketpair()
                stack.enter_context(stream)
                with other_end:
                    stack.enter_context(_carrying(server.carrier, other_end, messages))
            else:
                stream = stack.enter_context(
                    socket.create_connection((server.address, server.port), server.limit_s)
                )
                _notice_silence(stream)
            ssh = paramiko.Transport(stream)
            stack.callback(_close, ssh, stream)
            # So often its thread wakes up without cause; by default, ten times a second.
            stream.settimeout(_WAKE_S)
            ssh.banner_timeout = server.limit_s
            ssh.handshake_timeout = _LOGIN_S
            if kind is not None:
                ssh.get_security_options().key_types = [kind]
            ssh.start_client(timeout=_LOGIN_S)
            if ssh.host_key is None:
                raise TimeoutError
        except (paramiko.SSHException, OSError, EOFError) as exc:
            messages.seek(0)
            told = messages.read().decode(errors="replace")
            raise ConnectionError(told or _reason(exc, server, began)) from exc
    return ssh


def _reason(exc: Exception, server: _Server, began: float) -> str:
    """Return why no server has answered, in words of ssh that ``refusals`` knows."""
    waited_s = time.monotonic() - began
    if isinstance(exc, socket.gaierror):
        return f"ssh: Could not resolve hostname {server.address}: {exc.strerror}"
    return str(exc) if waited_s < server.limit_s else f"no answer within {waited_s:.0f} s"


@contextmanager
def _carrying(words: Sequence[str], stream: socket.socket, messages: IO[bytes]) -> Iterator[None]:
    """Run a program that carries a connection. messages: a file for its stderr."""
    process = subprocess.Popen(
        words,
        stdin=stream.fileno(),
        stdout=stream.fileno(),
        stderr=messages,
        process_group=process_group_ending_with_us(),
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _close(ssh: paramiko.Transport, stream: socket.socket) -> None:
    # paramiko's thread reads from the stream, and ends at once at the end of the stream.
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
    ssh.close()
    ssh.join(_CLOSE_S)


def _notice_silence(stream: socket.socket) -> None:
    """Have the kernel end the connection to a host that has vanished."""
    interval_s, count = KEEPALIVE["interval"], KEEPALIVE["count"]
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, count),
        (socket.TCP_USER_TIMEOUT, interval_s * count * 1000),
        (socket.TCP_NODELAY, 1),
    ):
        stream.setsockopt(socket.IPPROTO_TCP, option, value)


def _offered(ssh: paramiko.Transport) -> str:
    key = ssh.get_remote_server_key()
    return f"{key.get_name()} {key.get_base64()}"


def _authenticate(ssh: paramiko.Transport, account: str, key: paramiko.PKey) -> None:
    """Raise AuthenticationException if the host refuses the key, otherwise ConnectionError."""
    ssh.auth_timeout = _LOGIN_S
    began = time.monotonic()
    try:
        ssh.auth_publickey(account, key)
    except (paramiko.SSHException, OSError, EOFError) as exc:
        # paramiko raises it also if the host hangs up, as a booting host does, or does not answer.
        is_refused = ssh.is_active() and time.monotonic() - began < _LOGIN_S
        if is_refused and isinstance(exc, paramiko.AuthenticationException):
            raise
        raise ConnectionError(str(exc)) from exc


@dataclass(slots=True, kw_only=True)
class _ChannelConversation(CommandConversation):
    """A running command on a channel of a connection."""

    channel: paramiko.Channel
    config: Path

    def status(self) -> int:
        started = time.monotonic()
        if not self.channel.status_event.wait(self._remaining_s(started)):
            raise self._no_answer()
        self._read_stderr()
        rc = self.channel.exit_status
        if rc >= 0:
            return rc
        transport = self.channel.get_transport()
        if not transport.is_active():
            problem = f"the connection broke during `{shown_command(self.argv)}`"
            raise unreachable_error(self.host, self.config, problem, self.stderr_tail())
        return ENDED_BY_SIGNAL

    def _wait(self, *, reads: bool = False, writes: bool = False) -> tuple[bool, bool]:
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        started = time.monotonic()
        while True:
            self._read_stderr()
            is_over = self.channel.eof_received or self.channel.closed
            can_read = reads and bool(self.channel.recv_ready() or is_over)
            can_write = writes and bool(self.channel.send_ready())
            if can_read or can_write:
                return can_read, can_write
            if not (remaining_s := self._remaining_s(started)):
                raise self._no_answer()
            if reads:
                poll.poll((min(remaining_s, _PAUSE_S) if writes else remaining_s) * 1000)
            else:
                time.sleep(min(remaining_s, _PAUSE_S))

    def _read_piece(self) -> bytes:
        return self.channel.recv(_READ)

    def _write(self, data: memoryview) -> int:
        try:
            written = self.channel.send(bytes(data[:_READ]))
        except OSError as exc:
            raise BrokenPipeError from exc
        if not written:
            raise BrokenPipeError
        return written

    def _close_stdin(self) -> None:
        with suppress(OSError, EOFError):
            self.channel.shutdown_write()

    def _read_stderr(self) -> None:
        while self.channel.recv_stderr_ready():
            self._keep_stderr(self.channel.recv_stderr(_READ))
