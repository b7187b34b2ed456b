"""SSH transport: the ssh program runs each command, with the same `ssh_config` as a plain ``ssh
-F``.

Commands share a connection (see ``master``). Host keys are never trusted on first use. To nodes that
clusterctl makes, only the cluster's key is used: no agent, no keys of the user. For machines of the
user's own and an attached cluster, the user's own SSH configuration is used.
"""

from __future__ import annotations

import copy
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

from clusterctl.errors import KeyRefusedError, TransportError, UsageError
from clusterctl.state.inventory import job_inventory
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
from clusterctl.transport.login import HERE, LOGIN_HOST, count_call, here_words, login_of
from clusterctl.transport.master import Master, end_connection, may_ask, open_master
from clusterctl.transport.openssh import (
    NO_CONNECTION,
    CommandConversation,
    OpenSSH,
    SshConversation,
    prepare_pipes,
    start_program,
)
from clusterctl.transport.refusals import connection_error, proxy_of
from clusterctl.transport.sudo import AS_ROOT, PASSWORDS, Passwords, SudoMethod
from clusterctl.util.process import Result

_SETTLE_S = 1.0
# An attached cluster may shut out who tries again soon after a refused login.
_REFUSED_S = 60.0


@dataclass(slots=True, eq=False)
class CommandTransport(ABC):
    """The part of a ``Transport`` that ``_talk`` does not decide.

    max_output: maximum number of bytes of stdout that ``run`` accepts, and of stderr that it
        returns.
    path: folders that are appended to PATH of all commands, separated by colons. "": no folder.
    variables: the environment of all commands, beside that of a login.
    calls: the file that counts the commands. None: they are not counted.
    """

    host: str
    _: KW_ONLY
    path: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    calls: Path | None = None
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
        line, script, reads = self._wrapped(argv, env, reads=stdin is not None)
        with self._talk(argv, line, timeout_s) as talk:
            talk.deadline = deadline
            talk.most_stderr = self.max_output
            # If the command reads no stdin, closing stdin would end it.
            stdout = talk.exchange(script + (stdin or b""), self.max_output, close=reads)
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

    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> AbstractContextManager[Conversation]:
        return self._conversation(argv, silence_s or self.silence_s)

    @contextmanager
    def _conversation(
        self, argv: Sequence[str], silence_s: float, *, reads: bool = True
    ) -> Iterator[CommandConversation]:
        line, script, _ = self._wrapped(argv, reads=reads)
        with self._talk(argv, line, silence_s) as talk:
            talk.send(script)
            yield talk

    def _wrapped(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, *, reads: bool
    ) -> tuple[str, bytes, bool]:
        """Count the command. Return (line, script, whether it reads stdin), see ``wrap_command``.

        sudo reads a password from stdin, before the command reads the rest.
        """
        secret = b""
        if tuple(argv[: len(AS_ROOT)]) == AS_ROOT:
            argv, secret = self._sudo_way().command(argv)
            reads = reads or bool(secret)
        if self.calls is not None:
            count_call(self.calls)
        variables = {**self.variables, **(env or {})}
        line, script = wrap_command(argv, variables, reads=reads, path=self.path)
        return line, script + secret, reads

    def _sudo_way(self) -> SudoMethod:
        """Return how the user runs sudo. Raises SudoError. Default: without a password."""
        return SudoMethod()

    @abstractmethod
    def _talk(
        self, argv: Sequence[str], line: str, silence_s: float
    ) -> AbstractContextManager[CommandConversation]:
        """Run ``line``, made of ``argv`` by ``wrap_command``, in a login shell of the host."""


@dataclass(slots=True, eq=False)
class SSHTransport(CommandTransport):
    """Transport to a host of an `ssh_config` (see ``Transport``).

    user: account on the host. Default: the user in the `ssh_config`.
    stays: ``close`` leaves the connection open for the next clusterctl command, which uses it
        without a check within a minute. That of an attached cluster stays open.
    jump_to: returns the transport to a jump host. Default: a new one.
    passwords: for sudo on machines of the user.
    """

    config: Path
    _: KW_ONLY
    user: str | None = None
    stays: bool = False
    jump_to: Callable[[str], Transport] | None = None
    passwords: Passwords = PASSWORDS
    _sudo: SudoMethod | None = field(default=None, init=False, repr=False)
    _sudo_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _master: Master | None = field(default=None, init=False)
    _failed: TransportError | None = field(default=None, init=False)
    _refused: tuple[TransportError | None, float] = field(default=(None, 0.0), init=False)
    _unreachable: tuple[TransportError | None, float] = field(default=(None, 0.0), init=False)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set, init=False)
    _begun: dict[tuple[str, ...], tuple[ExitStack, CommandConversation]] = field(
        default_factory=dict, init=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def _sudo_way(self) -> SudoMethod:
        if not Workspace(self.config.parent).adopts_hosts:
            return SudoMethod()
        with self._sudo_lock:
            if self._sudo is None:
                self._sudo = self.passwords.way_to(self.host, self._run_sudo)
            return self._sudo

    def _run_sudo(self, argv: Sequence[str], stdin: bytes) -> Result:
        return self.run(argv, stdin=stdin, check=False)

    def log_in(self) -> None:
        """Open the shared connection; ssh may ask on this terminal. The first command raises the
        error.
        """
        with self._lock:
            try:
                self._master = self._open(asks=True)
            except TransportError as exc:
                self._failed = exc
                self._note_refusal(exc)

    def begin(self, argv: Sequence[str]) -> None:
        with self._lock:
            if self.stays and self._master is None:
                self._master = self._open(start=False)
            if self._master is None or self._master.has_ended():
                return
        with suppress(TransportError), ExitStack() as stack:
            talk = stack.enter_context(self._conversation(argv, self.silence_s))
            self._begun[tuple(argv)] = (stack.pop_all(), talk)

    @contextmanager
    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> Iterator[Conversation]:
        stack, talk = self._begun.pop(tuple(argv), (ExitStack(), None))
        with stack:
            if isinstance(talk, SshConversation) and talk.process.poll() is None:
                talk.silence_s = silence_s or self.silence_s
                yield talk
                return
        with self._conversation(argv, silence_s or self.silence_s) as talk:
            yield talk

    def close(self) -> None:
        if (master := self.leave()) and not self.stays and login_of(self.config) is None:
            end_connection(master.path)

    def leave(self) -> Master | None:
        """End the commands, and leave the shared connection open until it is idle for too long.

        Return the connection.
        """
        for stack, _ in self._begun.values():
            stack.close()
        self._begun.clear()
        for process in list(self._running):
            process.kill()
        with self._lock:
            master, self._master = self._master, None
            if master is not None:
                master.leave()
        return master

    @contextmanager
    def _talk(self, argv: Sequence[str], line: str, silence_s: float) -> Iterator[SshConversation]:
        """Run ``line`` in the host's login shell by ssh, over the shared connection if possible."""
        master = self.connect()
        # If the host refuses more sessions over the shared connection, ssh opens its own.
        shared = ("-S", str(master.path) if master else "none", "-o", "ControlMaster=no")
        words = OpenSSH(self.config, self.user).background(self.host, line, *shared)
        with start_program(words, is_ssh=True) as process:
            self._running.add(process)
            try:
                yield _Command(
                    self.host, argv, silence_s, process, is_wrapped=True, ssh=self, master=master
                )
            finally:
                self._running.discard(process)

    def connect(self) -> Master | None:
        """Return the shared connection, opened if necessary; None if each command must connect
        separately.

        Threads that wait for the same connection get the same error: a host that drops packets is
        tried once, not once for each thread.
        """
        asked = time.monotonic()
        with self._lock:
            unreachable, failed_at = self._unreachable
            if unreachable is not None and asked < failed_at:
                raise copy.copy(unreachable)
            refused, until = self._refused
            if refused is not None and time.monotonic() < until:
                raise refused
            failed = self._failed
            self._failed = None
            if failed is not None:
                raise failed
            if self._master is not None and self._master.has_ended():
                self._master.watch.close()
                self._master = None
            if self._master is None:
                connect_jump(self.host, self.config, self.jump_to)
                try:
                    self._master = self._open()
                except TransportError as exc:
                    self._note_refusal(exc)
                    self._unreachable = (exc, time.monotonic())
                    raise
            return self._master

    def _open(self, *, start: bool = True, asks: bool = False) -> Master | None:
        return open_master(
            self.config, self.host, self.user, checks=not self.stays, start=start, asks=asks
        )

    def _note_refusal(self, error: TransportError) -> None:
        """Have commands of the next minute raise the error of an attached cluster that refused the
        login.
        """
        if isinstance(error, KeyRefusedError) and login_of(self.config) is not None:
            self._refused = (error, time.monotonic() + _REFUSED_S)


def connect_jump(host: str, config: Path, jump_to: Callable[[str], Transport] | None) -> None:
    """Open the connection to the jump host, if the host is behind one.

    ssh itself would not tell why the jump host can't be reached. jump_to: see SSHTransport. Raises
    TransportError: the jump host's error, as an error of the host.
    """
    jump = proxy_of(host, config).jump
    if jump is None:
        return
    transport = jump_to(jump) if jump_to else SSHTransport(jump, config)
    try:
        if isinstance(transport, SSHTransport):
            transport.connect()
    except TransportError as exc:
        behind = copy.copy(exc)
        behind.what = f"{host}: its SSH connection goes through {jump}, which can't be reached"
        behind.host = host
        behind.jump_host = jump
        raise behind from exc


@dataclass(slots=True, kw_only=True)
class _Command(SshConversation):
    """A running command on a host; ``master`` is the connection that it shares, if any."""

    ssh: SSHTransport
    master: Master | None

    def _status(self, rc: int) -> int:
        """Return the command's exit status; -1 if a signal ended it. Raise UnreachableError if ssh
        failed.

        ssh exits with 255 if it fails, or if a signal ended the command. A command that itself
        exits with 255 looks the same as a command that a signal ended.
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


@dataclass(slots=True, eq=False)
class LocalTransport(CommandTransport):
    """Transport to this machine, a login node of an attached cluster, as this user (see
    ``Transport``).

    A command has a session of its own. It ends as it would over SSH: when its stdin or stdout is
    closed.
    """

    _running: set[subprocess.Popen[bytes]] = field(default_factory=set, init=False)

    def begin(self, argv: Sequence[str]) -> None:
        """Start nothing early, because no connection is needed."""

    def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        """End the commands."""
        for process in list(self._running):
            _close(process)

    @contextmanager
    def _talk(self, argv: Sequence[str], line: str, silence_s: float) -> Iterator[SshConversation]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            here_words(line),
            bufsize=0,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            # sshd also starts commands in the home folder.
            cwd=Path.home(),
            start_new_session=True,
        )
        prepare_pipes(process)
        self._running.add(process)
        try:
            yield SshConversation(self.host, argv, silence_s, process, is_wrapped=True)
        finally:
            self._running.discard(process)
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close a command's streams, at which it ends by itself. Do not wait for its end."""
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        stream.close()
    if process.poll() is None:
        threading.Thread(target=process.wait, daemon=True).start()


def _attached_setting(ssh_config: Path) -> tuple[str, Mapping[str, str]]:
    """Return the folders that PATH on an attached cluster may lack, and the variables that Slurm's
    commands need there. Empty for other clusters.
    """
    if login_of(ssh_config) is not None:
        # Before `attach` has finished there is no record. Commands that need it report a damaged
        # record.
        with suppress(UsageError):
            inventory = job_inventory(Workspace(ssh_config.parent))
            return inventory.path, inventory.variables
    return "", {}


class Connections(ExitStack):
    """Transports to the hosts of an `ssh_config`. Leaving the context ends their commands.

    The connections stay open for the next clusterctl command, until they are idle for too long.

    Entering the context logs in to an attached cluster if ssh may ask the user. Afterwards nothing
    asks.

    stays: name of the host whose connection is used without a check if it was used in the last
        minute.
    path: folders that are appended to PATH of all commands, separated by colons. "": no folder.
        Default: the folders that PATH on an attached cluster may lack.
    variables: the environment of all commands, beside that of a login. With ``path``.
    fans_out: whether commands go to many hosts. Then paramiko connects to hosts that clusterctl made.
        Default: ssh connects to all hosts.
    """

    def __init__(
        self,
        ssh_config: Path,
        *,
        stays: str | None = None,
        path: str | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        fans_out: bool = False,
    ) -> None:
        super().__init__()
        self.ssh_config = ssh_config
        self._stays = stays
        self._fans_out = fans_out
        self._path, self._variables = (
            _attached_setting(ssh_config) if path is None else (path, variables)
        )
        self._open: dict[tuple[str, str | None], Transport] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if login_of(self.ssh_config) is not None and may_ask():
            login = self.to(LOGIN_HOST)
            if isinstance(login, SSHTransport):
                login.log_in()
        return super().__enter__()

    def to(self, host: str, user: str | None = None) -> Transport:
        """Return the transport to this host as this user. Default: the admin user.

        The user of an attached cluster is always that of the login, so that there is only one
        connection.
        """
        login = login_of(self.ssh_config)
        if login is not None:
            user = None
        with self._lock:
            if (host, user) not in self._open:
                transport: CommandTransport
                if self._uses_paramiko(host, user):
                    from clusterctl.transport.paramiko_ssh import (  # noqa: PLC0415
                        ParamikoTransport,
                    )

                    transport = ParamikoTransport(host, self.ssh_config, user=user, jump_to=self.to)
                elif (login, host) == (HERE, LOGIN_HOST):
                    transport = LocalTransport(host, path=self._path, variables=self._variables)
                else:
                    transport = SSHTransport(
                        host,
                        self.ssh_config,
                        user=user,
                        path=self._path,
                        variables=self._variables,
                        stays=host == self._stays,
                        jump_to=self.to,
                    )
                transport.calls = (
                    Workspace(self.ssh_config.parent).calls if login is not None else None
                )
                self._open[host, user] = transport
                self.callback(transport.leave)
            return self._open[host, user]

    def _uses_paramiko(self, host: str, user: str | None) -> bool:
        """Return whether paramiko makes the connection, which then ends with this command.

        The connections of job users, and those that a program such as gcloud carries, are
        OpenSSH's: later commands use them.
        """
        if not self._fans_out or user is not None or login_of(self.ssh_config) is not None:
            return False
        proxy = proxy_of(host, self.ssh_config)
        is_carried = bool(proxy.command) and proxy.jump is None
        return not is_carried and not Workspace(self.ssh_config.parent).adopts_hosts

    def prepare(self, host: str) -> None:
        """Open the connection that a plain ssh to ``host`` uses: to its jump host, or to an
        attached cluster.

        ssh itself would not tell why the jump host can't be reached. Raises TransportError.
        """
        transport = self.to(host)
        if isinstance(transport, SSHTransport):
            if login_of(self.ssh_config) is None:
                connect_jump(host, self.ssh_config, self.to)
            else:
                transport.connect()
