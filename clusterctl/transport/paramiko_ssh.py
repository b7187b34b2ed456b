"""SSH by paramiko to hosts that clusterctl made. The connection to a host ends with the clusterctl
command.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import IO, Final, Self

from clusterctl.errors import TransportError
from clusterctl.state.inventory import KEEPALIVE
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    Transport,
    no_answer_error,
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

# paramiko needs invoke only for `Match exec` in an ssh_config that it reads itself. The import takes
# half of paramiko's start.
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
# paramiko's thread wakes up this often even without data. Its default is ten times a second.
_WAKE_S: Final = 1.0
# A host that refuses a session, because others run (MaxSessions in sshd_config(5)), is asked again.
_AGAIN_S: Final = 0.05

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
        # Another thread may hold the lock while it logs in. This ends its login, or it does so itself.
        resources, self._resources = self._resources, ExitStack()
        resources.close()

    @contextmanager
    def _talk(
        self, argv: Sequence[str], line: str, silence_s: float
    ) -> Iterator[CommandConversation]:
        ssh = self._connect()
        with ExitStack() as stack:
            began = time.monotonic()
            try:
                channel = _start_command(stack, ssh, line, silence_s)
            except (paramiko.SSHException, OSError, EOFError) as exc:
                if time.monotonic() - began >= silence_s:
                    raise no_answer_error(self.host, argv, silence_s) from exc
                problem = f"the connection broke before `{shown_command(argv)}`"
                raise unreachable_error(self.host, self.config, problem, exc) from exc
            yield _ChannelConversation(
                self.host,
                argv,
                silence_s,
                channel=channel,
                is_wrapped=True,
                config=self.config,
            )

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
            stack = self._resources
            try:
                connect_jump(self.host, self.config, self.jump_to)
                ssh = _log_in(stack, route)
                if self._resources is not stack:
                    stack.close()
                    problem = "the connection was closed during the login"
                    raise unreachable_error(self.host, self.config, problem)
            except TransportError as exc:
                self.close()
                self._failed = (exc, time.monotonic())
                raise
            self._ssh = ssh
            self._route = route
            return ssh


def _start_command(
    stack: ExitStack, ssh: paramiko.Transport, line: str, limit_s: float
) -> paramiko.Channel:
    """Run ``line`` in the host's login shell. Closing ``stack`` closes the channel.

    Raises SSHException, OSError or EOFError, also if the host does not answer within ``limit_s``.
    """
    channel = _open_session(ssh, limit_s)
    stack.callback(_close_channel, channel)
    # paramiko itself waits without a limit for the answer to the request.
    giving_up = threading.Timer(limit_s, _close_channel, [channel])
    giving_up.daemon = True
    giving_up.start()
    try:
        channel.exec_command(line)
    finally:
        giving_up.cancel()
    return channel


def _open_session(ssh: paramiko.Transport, limit_s: float) -> paramiko.Channel:
    until = time.monotonic() + limit_s
    while True:
        try:
            return ssh.open_session(timeout=max(0.0, until - time.monotonic()))
        except paramiko.SSHException:
            # Which one it is depends on the other threads, so that the class tells nothing.
            if not ssh.is_active() or time.monotonic() + _AGAIN_S > until:
                raise
        time.sleep(_AGAIN_S)


def _close_channel(channel: paramiko.Channel) -> None:
    with suppress(paramiko.SSHException, OSError, EOFError):
        channel.close()


@dataclass(frozen=True, slots=True)
class _Server:
    """Where an SSH server answers. carrier: the words of the program that carries the connection.
    Empty: none. limit_s: time in which it must greet.
    """

    address: str
    port: int
    carrier: tuple[str, ...]
    limit_s: float

    @classmethod
    def of(cls, entry: Mapping[str, str], host: str) -> Self:
        """Return the server of a host's entry in an `ssh_config`. Raise ValueError."""
        address = entry.get("HostName", host)
        port = entry.get("Port", "22")
        carrier = shlex.split(entry.get("ProxyCommand", ""))
        return cls(
            address,
            int(port),
            tuple(word.replace("%h", address).replace("%p", port) for word in carrier),
            limit_s=float(entry.get("ConnectTimeout", _CONNECT_S)),
        )


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
        known_hosts = read_text(Path(entry.get("UserKnownHostsFile", "").strip('"')))
        lines = (line.partition(" ") for line in known_hosts.splitlines())
        host_key = next((key.strip() for name, _, key in lines if name == host), "")
        if not host_key:
            raise unknown_key_error(host, config)
        try:
            server = _Server.of(entry, host)
        except ValueError as exc:
            raise incomplete_config_error(host, config, str(exc)) from exc
        return cls(
            host=host,
            config=config,
            user=user,
            account=user or entry.get("User", ""),
            server=server,
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
            stream.settimeout(_WAKE_S)
            ssh.banner_timeout = server.limit_s
            ssh.handshake_timeout = _LOGIN_S
            if kind is not None:
                ssh.get_security_options().key_types = [kind]
            ssh.start_client(timeout=_LOGIN_S)
            if ssh.host_key is None:
                raise TimeoutError
        # ValueError: a kind of key that paramiko does not know.
        except (paramiko.SSHException, OSError, EOFError, ValueError) as exc:
            messages.seek(0)
            told = messages.read().decode(errors="replace").strip()
            reasons = filter(None, (told, _reason(exc, server, began)))
            raise ConnectionError("\n".join(reasons)) from exc
    return ssh


def _reason(exc: Exception, server: _Server, began: float) -> str:
    """Return why no server has answered, in words that ``refusals`` recognizes as those of ssh."""
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
    if ssh.is_alive():
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
    # Unlike `get_remote_server_key`, this is known also if the host has hung up since.
    key = ssh.host_key
    if key is None:
        raise ConnectionError("the host has shown no key")
    return f"{key.get_name()} {key.get_base64()}"


def _authenticate(ssh: paramiko.Transport, account: str, key: paramiko.PKey) -> None:
    """Raise AuthenticationException if the host refuses the key, otherwise ConnectionError."""
    ssh.auth_timeout = _LOGIN_S
    began = time.monotonic()
    try:
        if ssh.auth_publickey(account, key):
            raise paramiko.AuthenticationException("the host asks for a second factor")
    except (paramiko.SSHException, OSError, EOFError) as exc:
        # paramiko also raises AuthenticationException if the host hangs up, as a booting host does, or
        # does not answer.
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
        except (paramiko.SSHException, OSError, EOFError) as exc:
            raise BrokenPipeError from exc
        if not written:
            raise BrokenPipeError
        return written

    def _close_stdin(self) -> None:
        with suppress(paramiko.SSHException, OSError, EOFError):
            self.channel.shutdown_write()

    def _read_stderr(self) -> None:
        while self.channel.recv_stderr_ready():
            self._keep_stderr(self.channel.recv_stderr(_READ))
