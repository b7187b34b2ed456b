"""Command lines of the ssh program for a cluster's `ssh_config`, and conversations with running
programs.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from clusterctl.errors import CommandError, MachineError, TransportError, UnreachableError
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    MARK,
    Conversation,
    checked_argv,
    command_error,
    enlarge_pipe,
    no_answer_error,
    shown_command,
)
from clusterctl.transport.login import HERE, LOGIN_HOST, here_words, login_of, no_login_error
from clusterctl.util.assets import digest
from clusterctl.util.process import Result

if TYPE_CHECKING:
    from clusterctl.state.inventory import Inventory

_SIGNALLED = 128
NO_CONNECTION = 255  # ssh's exit status
# Seconds after which a connection without a command ends.
IDLE_S = 300
BRIEF_S = 10
_STDERR_TAIL = 1 << 16
_NOT_FOUND = 127  # shell's exit status
# ssh's options for a program: the forwardings of a user's configuration fail if their port is in
# use, and a second connection always finds it in use.
NO_FORWARDING = ("-o", "ClearAllForwardings=yes", "-o", "ForwardX11=no")
_MOST_NOISE = 1 << 20  # bytes
_PAUSE_MS = 50
# Bytes read from a pipe at once. For more, glibc would map and clear the memory for each read.
_READ = 120_000


@contextmanager
def start_conversation(
    words: Sequence[str],
    *,
    silence_s: float,
    stdin: int = subprocess.PIPE,
    remote: tuple[str, Sequence[str]] | None = None,
    script: bytes = b"",
) -> Iterator[Conversation]:
    """Start a program and yield a conversation with it.

    remote: (host, command on the host) if the program is ssh.
    script: sent first on stdin; needed for a command line made by ``wrap_command``.
    """
    host, argv = remote or ("localhost", words)
    with start_program(words, stdin=stdin, is_ssh=remote is not None) as process:
        talk = SshConversation(
            host, argv, silence_s, process, is_ssh=remote is not None, is_wrapped=bool(script)
        )
        if script:
            talk.send(script)
        yield talk


@contextmanager
def start_program(
    words: Sequence[str],
    *,
    stdin: int = subprocess.PIPE,
    cwd: Path | None = None,
    is_ssh: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program with pipes as its streams. Leaving the ``with`` kills the program and its
    children.

    is_ssh: whether the program is ssh. If clusterctl is killed, ssh and its remote command end as
    well. Raises CommandError if the program can't be started.
    """
    try:
        process = subprocess.Popen(
            words,
            bufsize=0,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            process_group=process_group_ending_with_us() if is_ssh else 0,
        )
    except OSError as exc:
        raise CommandError(
            f"`{shown_command(words)}` can't be started on this machine",
            code="tool-missing",
            rc=_NOT_FOUND,
            stderr=str(exc),
        ) from exc
    with process:
        prepare_pipes(process)
        try:
            yield process
        finally:
            if is_ssh:
                process.kill()
            elif process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def prepare_pipes(process: subprocess.Popen[bytes]) -> None:
    """Enlarge the pipes of a program, and make writing to its stdin non-blocking, as ``SshConversation``
    expects.
    """
    for pipe in filter(None, (process.stdin, process.stdout)):
        enlarge_pipe(pipe.fileno())
    if process.stdin is not None:
        os.set_blocking(process.stdin.fileno(), False)


def process_group_ending_with_us() -> int:
    """Return the id of a process group that is killed as soon as this process ends, even by
    SIGKILL.
    """
    return _leader(os.getpid()).pid


@cache
def _leader(_owner: int) -> subprocess.Popen[bytes]:
    """Start a process that kills its process group when this process, with pid ``_owner``, ends."""
    # Programs do not inherit the writing end, so the kernel closes it when this process ends.
    reading, _ = os.pipe()
    nothing = subprocess.DEVNULL
    words = ["sh", "-c", "read -r _; kill -KILL 0"]
    try:
        return subprocess.Popen(
            words, stdin=reading, stdout=nothing, stderr=nothing, process_group=0
        )
    finally:
        os.close(reading)


def _fd(pipe: IO[bytes] | None) -> int:
    assert pipe is not None  # noqa: S101 - all streams of a conversation are pipes
    return pipe.fileno()


@dataclass(slots=True)
class CommandConversation(ABC):
    """A running command (see ``Conversation``), whatever carries its streams.

    silence_s: seconds without a byte after which NoAnswerError is raised, if ``deadline`` is None.
    deadline: time (`time.monotonic`) after which NoAnswerError is raised.
    is_wrapped: True until the command prints ``MARK``. The command's own output follows ``MARK``.
    """

    host: str
    argv: Sequence[str]
    silence_s: float
    _: KW_ONLY
    deadline: float | None = None
    is_wrapped: bool = False
    most_stderr: int = _STDERR_TAIL
    _noise: bytearray = field(default_factory=bytearray, init=False)
    _stderr: bytearray = field(default_factory=bytearray, init=False)

    def send(self, data: bytes) -> None:
        unsent = memoryview(data)
        try:
            while unsent:
                self._wait(writes=True)
                unsent = unsent[self._write(unsent) :]
        except BrokenPipeError:
            self.finish()
            raise command_error(
                self.host, self.argv, 0, "the command exited before it had read all its input"
            ) from None

    def receive(self) -> bytes:
        while True:
            self._wait(reads=True)
            if (data := self._read()) is not None:
                return data

    def exchange(self, stdin: bytes, most: int, *, close: bool) -> bytes:
        """Write to the command's stdin while reading its stdout. Return the stdout.

        close: whether to close stdin after the last byte. The command need not read all of stdin.
        Raises TransportError if the command prints more than ``most`` bytes.
        """
        output = bytearray()
        unsent = memoryview(stdin)
        while len(output) <= most:
            can_read, can_write = self._wait(reads=True, writes=bool(unsent))
            if can_write:
                try:
                    unsent = unsent[self._write(unsent) :]
                except BrokenPipeError:
                    unsent = unsent[:0]
                if not unsent and close:
                    self._close_stdin()
            if can_read:
                if (data := self._read()) == b"":
                    return bytes(output)
                output += data or b""
        problem = f"`{shown_command(self.argv)}` printed more than {most} bytes"
        raise TransportError(problem, about="connection", where=self.host, host=self.host)

    def finish(self) -> None:
        self._close_stdin()
        while self.receive():
            pass
        self.raise_unless_succeeded()

    def raise_unless_succeeded(self) -> None:
        """Raise CommandError unless the command exits with status 0. Call this at the end of its
        stdout.
        """
        if (rc := self.status()) != 0:
            raise command_error(self.host, self.argv, rc, self.stderr_tail())

    @abstractmethod
    def status(self) -> int:
        """Wait for the command to exit, and return its exit status. Call this at the end of its
        stdout.

        Raises NoAnswerError if the command does not exit in time, UnreachableError if the
        connection broke.
        """

    def stderr_tail(self) -> str:
        """Return the last part of the command's stderr. The command must have exited."""
        return self._stderr.decode(errors="replace")

    @abstractmethod
    def _wait(self, *, reads: bool = False, writes: bool = False) -> tuple[bool, bool]:
        """Wait until stdout can be read (``reads``) or stdin be written (``writes``). Return which.

        Reads stderr meanwhile. Raises NoAnswerError.
        """

    @abstractmethod
    def _read_piece(self) -> bytes:
        """Return a piece of stdout, which can be read; b"" at its end."""

    @abstractmethod
    def _write(self, data: memoryview) -> int:
        """Write to stdin, which can be written. Return the number of bytes. Raises BrokenPipeError."""

    @abstractmethod
    def _close_stdin(self) -> None:
        """Close stdin. May be called twice."""

    def _read(self) -> bytes | None:
        """Return a piece of the command's stdout; None while only the host's login shell has
        printed.
        """
        data = self._read_piece()
        if not self.is_wrapped:
            return data
        self._noise += data
        _, mark, rest = self._noise.partition(MARK)
        self.is_wrapped = not mark
        if not mark and (not data or len(self._noise) > _MOST_NOISE):
            raise self._login_shell_error(bytes(self._noise))
        return bytes(rest) or None

    def _login_shell_error(self, noise: bytes) -> TransportError:
        if len(noise) <= _MOST_NOISE and (rc := self.status()) not in {0, NO_CONNECTION}:
            return command_error(
                self.host, self.argv, rc, self.stderr_tail() + noise.decode(errors="replace")
            )
        return TransportError(
            f"the login shell on the host did not run `{shown_command(self.argv)}`",
            about="connection",
            where=self.host,
            why=noise[-500:].decode(errors="replace"),
            fix="check the account's startup files on the host, such as ~/.bashrc",
            host=self.host,
        )

    def _keep_stderr(self, chunk: bytes) -> None:
        """Keep the last ``most_stderr`` bytes of stderr."""
        self._stderr += chunk
        del self._stderr[: -self.most_stderr]

    def _remaining_s(self, started: float) -> float:
        """Return the seconds until the command is given up, if its silence began at ``started``."""
        end = self.deadline if self.deadline is not None else started + self.silence_s
        return max(0.0, end - time.monotonic())

    def _no_answer(self) -> TransportError:
        return no_answer_error(self.host, self.argv, self.silence_s)


@dataclass(slots=True)
class SshConversation(CommandConversation):
    """A running program (see ``Conversation``). is_ssh: whether the program is ssh."""

    process: subprocess.Popen[bytes]
    _: KW_ONLY
    is_ssh: bool = False

    def status(self) -> int:
        poll = select.poll()
        poll.register(_fd(self.process.stderr), select.POLLIN)
        started = time.monotonic()
        while self.process.poll() is None:
            if poll.poll(_PAUSE_MS) and not self._read_stderr():
                break
            if not self._remaining_s(started):
                raise self._no_answer()
        while poll.poll(0) and self._read_stderr():
            pass
        try:
            rc = max(self.process.wait(self._remaining_s(started)), ENDED_BY_SIGNAL)
        except subprocess.TimeoutExpired as exc:
            raise self._no_answer() from exc
        return self._status(rc)

    def _status(self, rc: int) -> int:
        if self.is_ssh and rc == NO_CONNECTION:
            problem = f"{self.host}: the connection broke during `{shown_command(self.argv)}`"
            fix = "check the cluster with `clusterctl status`, then try again"
            raise UnreachableError(problem, why=self.stderr_tail(), fix=fix, host=self.host)
        return rc

    def _wait(self, *, reads: bool = False, writes: bool = False) -> tuple[bool, bool]:
        poll = select.poll()
        stdin = _fd(self.process.stdin) if writes else None
        stdout = _fd(self.process.stdout) if reads else None
        stderr = _fd(self.process.stderr)
        if stdin is not None:
            poll.register(stdin, select.POLLOUT)
        if stdout is not None:
            poll.register(stdout, select.POLLIN)
        poll.register(stderr, select.POLLIN)
        started = time.monotonic()
        while True:
            ready = {fd for fd, _ in poll.poll(self._remaining_s(started) * 1000)}
            if not ready:
                raise self._no_answer()
            if stderr in ready and not self._read_stderr():
                poll.unregister(stderr)
            if ready - {stderr}:
                return stdout in ready, stdin in ready

    def _read_piece(self) -> bytes:
        return os.read(_fd(self.process.stdout), _READ)

    def _write(self, data: memoryview) -> int:
        return os.write(_fd(self.process.stdin), data)

    def _close_stdin(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _read_stderr(self) -> bool:
        """Read more of stderr. Return False at end of file."""
        chunk = os.read(_fd(self.process.stderr), _READ)
        self._keep_stderr(chunk)
        return bool(chunk)


@dataclass(frozen=True, slots=True)
class OpenSSH:
    """The ssh command line for the hosts of an `ssh_config`, as ``user`` (default: the user in the
    file).

    The login of an attached cluster is reached as its own user, and without ssh if it is this
    machine. All methods raise MachineError if this machine has no ssh program, TransportError if
    the command holds a NUL character, and UsageError if an attached cluster allows no login to the
    host.
    """

    config: Path
    user: str | None = None

    def argv(self, host: str, command: str | Sequence[str] = (), *options: str) -> list[str]:
        """Return the command line that runs ``command`` on ``host`` for a user at this terminal.

        A list is quoted for the remote shell; a string is passed to the shell unchanged. Empty
        command: run a
        login shell. options: of ssh. An open connection is shared, but none is left open.
        """
        if login_of(self.config) is None:
            options = ("-o", "ControlMaster=no", *options)
        return self._words(self.config, host, command, *options, shares=True)

    def background(self, host: str, command: str, *options: str, shares: bool = False) -> list[str]:
        """Return the command line of an ssh that has no terminal and asks nothing.

        shares: use the connection to an attached cluster that is open.
        """
        config = self.config
        quiet: tuple[str, ...] = ()
        if login_of(self.config) is not None:
            # A site's banner is no output of the command. ssh takes the first value of an option.
            config = Workspace(self.config.parent).background_config
            quiet = ("-o", "LogLevel=ERROR")
        # ssh takes the first value of an option, so ``options`` may allow forwardings.
        options = ("-T", "-o", "BatchMode=yes", *options, *quiet, *NO_FORWARDING)
        return self._words(config, host, command, *options, shares=shares)

    def alone(self, host: str, command: str, *options: str) -> list[str]:
        """Return the command line of an ssh in the background with its own connection.

        The connection to an attached cluster is shared, because opening another could ask for a
        password.
        """
        if login_of(self.config) is not None:
            return self.background(host, command, *options, shares=True)
        return self.background(host, command, "-S", "none", *options)

    def _words(
        self, config: Path, host: str, command: str | Sequence[str], *options: str, shares: bool
    ) -> list[str]:
        login = login_of(self.config)
        user = self.user
        if login is not None:
            if host != LOGIN_HOST:
                raise no_login_error(host)
            host = login
            user = None
        line = command if isinstance(command, str) else shlex.join(command)
        checked_argv([line])
        if login == HERE:
            return here_words(command)
        if shutil.which("ssh") is None:
            fix = "install ssh: `apt-get install openssh-client`"
            raise MachineError("ssh is not installed on this machine", code="tool-missing", fix=fix)
        shared = _shared(self.config) if shares and login is not None else ()
        words = ["ssh", "-F", str(config.absolute()), *shared, *options]
        if user is not None:
            words += ["-l", user]
        return [*words, "--", host, *([line] if line else [])]


def login_socket(config: Path) -> Path | None:
    """Return the control socket of the connection to the login of an attached cluster; None if
    other users could enter its folder.
    """
    folder = Workspace(config.parent).connections
    return folder / f"login-{digest(login_of(config) or '')}" if is_private(folder) else None


def is_private(folder: Path) -> bool:
    """Return whether only this account may enter the folder for sockets. Create it if it is
    missing.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    is_closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return is_closed and status.st_uid == os.geteuid()


def _shared(config: Path) -> tuple[str, ...]:
    """Return ssh's options for the connection to an attached cluster.

    Empty if clusterctl has opened none. Then ssh uses the connection that the user's configuration
    names, if that is open.
    """
    path = login_socket(config)
    # ssh would print that a shared connection is closed.
    return ("-S", str(path), "-o", "LogLevel=ERROR") if path is not None and path.exists() else ()


def write_ssh_files(inventory: Inventory, workspace: Workspace) -> None:
    """Write known_hosts and `ssh_config`."""
    write_atomic(workspace.known_hosts, inventory.known_hosts())
    write_atomic(workspace.ssh_config, ssh_config_text(inventory, workspace, workspace.key))


def ssh_config_text(inventory: Inventory, workspace: Workspace, key: Path) -> str:
    """Return the `ssh_config` of a workspace. key: the private key of the admin user."""
    try:
        has_auto_down = b"auto_down" in workspace.spec.read_bytes()
    except FileNotFoundError:
        has_auto_down = False
    # An open connection would keep a cluster up that removes itself when it is idle.
    return inventory.ssh_config(workspace, key=key, idle_s=BRIEF_S if has_auto_down else IDLE_S)


def run_attached(argv: Sequence[str]) -> int:
    """Run a program on this terminal. Return its exit status, or 128 + N if signal N ended it."""
    process = subprocess.Popen(argv)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            # ssh restores the terminal when it gets SIGTERM.
            process.terminate()
            process.wait()
    return status if status >= 0 else _SIGNALLED - status


def run_captured(argv: Sequence[str]) -> Result:
    """Run a program with this process's stdin and return its exit status and output."""
    result = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    return Result(result.returncode, result.stdout, result.stderr)
