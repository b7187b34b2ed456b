"""SSH transport: the ssh program runs each command, with the same `ssh_config` as a plain ``ssh -F``.

Commands share a connection (OpenSSH's ControlMaster). Its socket is in a private folder beside the
`ssh_config`. After ``IDLE_S`` without a command, the connection is closed. Only the cluster's key and
known_hosts are used: no agent, no keys of the user, no trust on first use.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import secrets
import select
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from clusterctl.errors import TransportError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    SILENCE_S,
    Conversation,
    Transport,
    command_error,
    shown_command,
    unreachable_error,
    wrap_command,
)
from clusterctl.transport.openssh import ALONE, NO_CONNECTION, OpenSSH, Talk, start_program
from clusterctl.transport.refusals import connection_error, proxy_of
from clusterctl.util.process import Result

IDLE_S = 300
# As in the `ssh_config`. While a host behind the jump host is connected, the connection is not idle.
JUMP_IDLE_S = 10
# A connection used more recently than this is used without a check: the next command notices if it is dead.
FRESH_S = 60.0
_ANSWER_S = 10.0
# ssh has limits of its own, such as ConnectTimeout in the `ssh_config`.
_START_S = 75.0
_EXIT_S = 2.0
# Time to connect to the socket of a new connection. A connection without a watcher ends after this time.
_WATCHED_WITHIN_S = 3
_SETTLE_S = 1.0
_NO_SOCKET = re.compile("unix_listener|mux listener|ControlSocket")


@dataclass(frozen=True, slots=True)
class Master:
    """An SSH connection that commands share, held by an ssh process. folder, name: of its control socket.

    watch: a connection to the control socket. An idle ssh does not exit while ``watch`` is open.
    stays: whether ``close`` leaves the SSH connection open for the next clusterctl command.
    """

    folder: Path
    name: str
    watch: socket.socket
    stays: bool

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Wait up to ``within_s`` seconds for the end of the connection. Return whether it has ended."""
        if self.watch.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.watch, 0)
        return bool(poll.poll(within_s * 1000))

    def close(self) -> None:
        """End the connection, unless ``stays`` is set. May be called twice."""
        self.watch.close()
        if not self.stays:
            _end_connection(self.folder, self.name)
            return
        with suppress(OSError):
            os.utime(self.folder / self.name)


def open_master(
    config: Path, host: str, user: str | None, *, stays: bool, start: bool = True, socket_name: str = ""
) -> Master | None:
    """Return a shared connection to a host. Return None if each command must connect separately.

    stays: whether to share the connection with later clusterctl commands, until the `ssh_config` file is
        replaced. Otherwise the connection ends with this process, even if the process is killed.
    start: whether to open a connection if no connection is open.
    socket_name: use this socket, which the `ssh_config` names too. Needs ``stays``.

    Raises:
        HostKeyError, KeyRefusedError: the host has another key, or refuses the cluster's key.
        UnreachableError, TransportError: the host can't be reached, or ssh rejects the `ssh_config`.
    """
    folder = _private_folder(config)
    if folder is None or not config.exists():
        return None
    name = secrets.token_hex(8)
    if stays:
        status = config.stat()
        # Machines may share a home, but a socket works only on the machine that created it.
        words = (os.uname().nodename, host, user, status.st_ino, status.st_mtime_ns)
        name = socket_name or hashlib.sha256(repr(words).encode()).hexdigest()[:16]
        with suppress(OSError):
            if time.time() - (folder / name).stat().st_mtime < FRESH_S:
                return Master(folder, name, _connect(folder, name), stays)
    if not start:
        return None
    # ssh opens a connection if none is open, or if a killed ssh has left its socket. A connection that was
    # idle for long may be dead without its ssh knowing, as after a laptop's sleep, so the first try is short.
    idle_s = JUMP_IDLE_S if socket_name else IDLE_S if stays else _WATCHED_WITHIN_S
    ssh = OpenSSH(config, user)
    options = ["-S", f"./{name}", "-o", "BatchMode=yes", "-o", "ControlMaster=auto"]
    options += ["-o", f"ControlPersist={idle_s}", *(() if stays else ("-f", "-N"))]
    command = ssh.argv(host, "true" if stays else (), *options)
    for limit_s in (_ANSWER_S, _START_S) if (folder / name).exists() else (_START_S,):
        rc, stderr = _run_ssh(command, folder, limit_s)
        if rc is not None:
            break
        _end_connection(folder, name)
    if rc in {None, NO_CONNECTION} and not _NO_SOCKET.search(stderr):
        if not stderr or "kex_exchange_identification" in stderr:
            # A persistent ssh discards its ProxyCommand's messages, so repeat the attempt with a plain ssh.
            _, stderr = _run_ssh(ssh.argv(host, "true", *ALONE, "-o", "BatchMode=yes"), folder, _START_S)
        raise connection_error(host, config, stderr, user)
    try:
        return Master(folder, name, _connect(folder, name), stays)
    except OSError:
        return None


def end_all_connections(config: Path) -> None:
    """End the shared connections to all hosts of this `ssh_config`, including connections in use."""
    folder = Workspace(config.parent).connections
    with suppress(OSError):
        for socket_file in list(folder.iterdir()):
            _end_connection(folder, socket_file.name)


def _run_ssh(words: list[str], folder: Path, limit_s: float) -> tuple[int | None, str]:
    """Run ssh. Return (exit status, stderr), with status None if ssh ran longer than ``limit_s``."""
    # A file instead of a pipe, because the ssh that stays in the background may keep its stderr open.
    with tempfile.TemporaryFile() as stderr:
        nothing = subprocess.DEVNULL
        # The ProxyCommand of a shared connection stays in this group, so the group must outlive clusterctl.
        process = subprocess.Popen(
            words, cwd=folder, stdin=nothing, stdout=nothing, stderr=stderr, process_group=0
        )
        try:
            rc = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None, f"no answer within {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        stderr.seek(0)
        return rc, stderr.read().decode(errors="replace")


def _private_folder(config: Path) -> Path | None:
    """Return the folder for sockets, created if missing; None if other users could enter the folder."""
    folder = Workspace(config.parent.absolute()).connections
    try:
        # Root must not create a folder in a user's workspace.
        if config.parent.stat().st_uid == os.geteuid():
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return folder if is_private and status.st_uid == os.geteuid() else None


def _connect(folder: Path, name: str) -> socket.socket:
    """Connect to the socket of a shared connection; raise OSError if no ssh process serves it."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    watch = socket.socket(socket.AF_UNIX)
    try:
        # The real path may be too long for a socket address. Linux only.
        watch.connect(f"/proc/self/fd/{folder_fd}/{name}")
    except BaseException:
        watch.close()
        raise
    finally:
        os.close(folder_fd)
    return watch


def _end_connection(folder: Path, name: str) -> None:
    _run_ssh(["ssh", "-F", "/dev/null", "-O", "exit", "-S", f"./{name}", "host"], folder, _EXIT_S)
    (folder / name).unlink(missing_ok=True)


class Jumps:
    """The connections to the jump hosts of an `ssh_config`, which all hosts behind a jump host share."""

    def __init__(self) -> None:
        self._masters: dict[str, Master | None] = {}
        self._failed: dict[str, tuple[float, TransportError]] = {}
        self._lock = threading.Lock()

    def open(self, host: str, config: Path) -> None:
        """Open the connection to the jump host of ``host``, if it is behind a jump host and not connected.

        Raise the jump host's error, as an error of ``host``, if it can't be reached. Threads that wait for
        the same connection get the same error, so a broken tunnel is tried once, not once for each host.
        """
        asked, jump = time.monotonic(), proxy_of(host, config).jump
        if jump is None:
            return
        jump_host, name = jump
        with self._lock:
            master = self._masters.get(name)
            if master is not None and not master.has_ended():
                return
            failed_at, error = self._failed.get(name, (0.0, None))
            if error is None or failed_at < asked:
                try:
                    self._masters[name] = open_master(config, jump_host, None, stays=True, socket_name=name)
                    return
                except TransportError as exc:
                    error = exc
                    self._failed[name] = (time.monotonic(), exc)
        raise _behind(host, jump_host, error)

    def close(self) -> None:
        with self._lock:
            for master in filter(None, self._masters.values()):
                master.close()
            self._masters.clear()


def _behind(host: str, jump_host: str, error: TransportError) -> TransportError:
    """Return the error of a jump host as the error of a host behind it."""
    copied = copy.copy(error)
    copied.what = f"{host}: its SSH connection goes through {jump_host}, which can't be reached"
    copied.host = host
    return copied


@dataclass(slots=True, eq=False)
class SSHTransport:
    """Transport to a host of an `ssh_config` (see ``Transport``).

    user: account on the host. Default: the user in the `ssh_config`.
    stays: leave the connection open for the next clusterctl command.
    max_output: maximum number of bytes of stdout that ``run`` accepts, and of stderr that it returns.
    jumps: the connections to jump hosts, shared with the transports to other hosts.
    """

    host: str
    config: Path
    _: KW_ONLY
    user: str | None = None
    stays: bool = False
    max_output: int = 64 << 20
    silence_s: float = SILENCE_S
    jumps: Jumps = field(default_factory=Jumps)
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
    def _conversation(self, argv: Sequence[str], silence_s: float, *, reads: bool = True) -> Iterator[Talk]:
        line, script = wrap_command(argv, reads=reads)
        with self._talk(argv, line, silence_s) as talk:
            talk.send(script)
            yield talk

    @contextmanager
    def _talk(self, argv: Sequence[str], line: str, silence_s: float) -> Iterator[Talk]:
        """Run ``line`` in the host's login shell by ssh, over the shared connection if possible."""
        master = self._connected()
        # If the host refuses more sessions over the shared connection, ssh opens its own.
        options = ("-S", f"./{master.name}" if master else "none", "-T", "-o", "BatchMode=yes")
        words = OpenSSH(self.config, self.user).argv(self.host, line, *options)
        with start_program(words, cwd=master.folder if master else None, is_ssh=True) as process:
            self._running.add(process)
            try:
                yield _Command(self.host, argv, process, silence_s, is_wrapped=True, ssh=self, master=master)
            finally:
                self._running.discard(process)

    def _connected(self) -> Master | None:
        """Return the shared connection, opened if necessary; None if each command must connect separately."""
        with self._lock:
            if self._master is not None and self._master.has_ended():
                self._master.close()
                self._master = None
            if self._master is None:
                self.jumps.open(self.host, self.config)
                stays = self.stays and _may_stay(self.config)
                self._master = open_master(self.config, self.host, self.user, stays=stays)
            return self._master


@dataclass(slots=True, kw_only=True)
class _Command(Talk):
    """A running command on a host; ``master`` is the connection that it shares, if any."""

    ssh: SSHTransport
    master: Master | None

    def _status(self, rc: int) -> int:
        """Return the command's exit status; -1 if a signal ended it. Raise UnreachableError if ssh failed.

        ssh exits with 255 if it fails, or if a signal ended the command. A command that itself exits with 255
        can't be told apart from a command that a signal ended.
        """
        ended_here = rc == ENDED_BY_SIGNAL
        if rc != NO_CONNECTION and not ended_here:
            return rc
        if self.is_wrapped:
            # The command has not started, so the message is from ssh.
            raise connection_error(self.host, self.ssh.config, self.stderr_tail(), self.ssh.user)
        if ended_here or self.master is None or self.master.has_ended(_SETTLE_S):
            problem = f"the connection broke during `{shown_command(self.argv)}`"
            raise unreachable_error(self.host, self.ssh.config, problem, self.stderr_tail())
        return ENDED_BY_SIGNAL


def _may_stay(config: Path) -> bool:
    """Return whether an unused connection may stay open. It would keep an auto_down cluster running."""
    workspace = Workspace(config.parent)
    try:
        return not workspace.removing.exists() and b"auto_down" not in workspace.spec.read_bytes()
    except FileNotFoundError:
        return True


class Connections(ExitStack):
    """Transports to the hosts of an `ssh_config`. Leaving the context closes their connections.

    stays: name of the host whose connection is left open for the next clusterctl command.
    """

    def __init__(self, ssh_config: Path, *, stays: str | None = None) -> None:
        super().__init__()
        self._ssh_config = ssh_config
        self._stays = stays
        self._open: dict[tuple[str, str | None], Transport] = {}
        self._jumps = Jumps()
        self.callback(self._jumps.close)
        self._lock = threading.Lock()

    def to(self, host: str, user: str | None = None) -> Transport:
        """Return the transport to this host as this user. Default: the admin user."""
        with self._lock:
            if (host, user) not in self._open:
                stays = host == self._stays
                self._open[host, user] = SSHTransport(
                    host, self._ssh_config, user=user, stays=stays, jumps=self._jumps
                )
                self.callback(self._open[host, user].close)
            return self._open[host, user]
