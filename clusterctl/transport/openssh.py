"""Commands as child processes: talks with one, and the ssh program, which reads our `ssh_config`."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from clusterctl.errors import CommandError, MachineError, UnreachableError
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    Conversation,
    enlarge,
    failed,
    no_answer,
    sendable,
    shown,
)
from clusterctl.transport.remote_content import READ
from clusterctl.util.process import Result

if TYPE_CHECKING:
    from clusterctl.state.inventory import Inventory

# Options of a connection that lives and ends by itself, whatever others share, and has no terminal.
ALONE = ("-T", "-o", "ControlPath=none")
_SIGNALLED = 128
NO_CONNECTION = 255  # ssh's own exit status for a connection that was not made or broke
_STDERR_TAIL = 1 << 16
_NOT_FOUND = 127  # the shell's exit status for it


@contextmanager
def talking(
    words: Sequence[str],
    *,
    silence_s: float,
    stdin: int = subprocess.PIPE,
    remote: tuple[str, Sequence[str]] | None = None,
) -> Iterator[Conversation]:
    """Start a program and talk with it; ``remote``: it is ssh, for this command on this host."""
    with tempfile.TemporaryFile() as stderr, _started(words, stdin, stderr) as process:
        for pipe in filter(None, (process.stdin, process.stdout)):
            enlarge(pipe.fileno())
        host, argv = remote or ("localhost", words)
        try:
            yield Talk(host, argv, process, partial(_tail, stderr), silence_s, is_ssh=remote is not None)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):  # with its children
                    os.killpg(process.pid, signal.SIGKILL)


def _started(argv: Sequence[str], stdin: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        # A session of its own, so that what it starts can be ended with it.
        return subprocess.Popen(
            argv, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
    except OSError as exc:
        raise CommandError(
            f"can't run `{shown(argv)}`", code="tool-missing", rc=_NOT_FOUND, stderr=str(exc)
        ) from exc


class Process(Protocol):
    """A command with pipes, as `subprocess` has it."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Where it reads from."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """What it writes to."""

    def wait(self, timeout: float) -> int:
        """Its exit status, below 0 where a signal ended it.

        Raises:
            TimeoutError, TimeoutExpired: it has not ended by then.
            ConnectionError: the connection to its host broke.
        """


@dataclass(frozen=True, slots=True)
class Talk:
    """See ``Conversation``. ``complaint`` is the end of its stderr; ``is_ssh``: it is the ssh program."""

    host: str
    argv: Sequence[str]
    process: Process
    complaint: Callable[[], str]
    silence_s: float
    is_ssh: bool = False

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None  # noqa: S101  # it is a pipe
        fd, left = self.process.stdin.fileno(), memoryview(data)
        os.set_blocking(fd, False)
        try:
            while left:
                self._wait(fd, select.POLLOUT)
                left = left[os.write(fd, left) :]
        except BrokenPipeError:
            self.finish()
            raise failed(self.host, self.argv, 0, "it ended before it had read all") from None

    def receive(self) -> bytes:
        assert self.process.stdout is not None  # noqa: S101
        fd = self.process.stdout.fileno()
        self._wait(fd, select.POLLIN)
        return os.read(fd, READ)

    def finish(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        while self.receive():
            pass
        self.ended()

    def ended(self) -> None:
        """Raises unless the command, whose stdout is at its end, exits with 0."""
        try:
            rc = max(self.process.wait(self.silence_s), ENDED_BY_SIGNAL)
            broke = self.is_ssh and rc == NO_CONNECTION
        except (subprocess.TimeoutExpired, TimeoutError) as exc:
            raise no_answer(self.host, self.argv, self.silence_s) from exc
        except ConnectionError:
            rc, broke = NO_CONNECTION, True
        if broke:
            what = f"{self.host}: the connection broke during `{shown(self.argv)}`"
            fix = "`clusterctl up` starts it again if it is down"
            raise UnreachableError(what, why=self.complaint(), fix=fix, host=self.host)
        if rc != 0:
            raise failed(self.host, self.argv, rc, self.complaint())

    def _wait(self, fd: int, event: int) -> None:
        """Return when a pipe of the command is ready, or at its end."""
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(self.silence_s * 1000):
            raise no_answer(self.host, self.argv, self.silence_s)


def _tail(stderr: IO[bytes]) -> str:
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _STDERR_TAIL))
    return stderr.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class OpenSSH:
    """How ssh reaches the hosts of one `ssh_config`, as ``user`` (default: the one the file names)."""

    config: Path
    user: str | None = None

    def argv(self, host: str, command: str | Sequence[str] = (), *options: str) -> list[str]:
        """The command line that runs ``command`` on ``host``, or a login shell if it is empty.

        Words arrive verbatim; a string is for the remote shell.

        Raises:
            MachineError: there is no ssh on this machine.
            TransportError: the command can't be sent.
        """
        if shutil.which("ssh") is None:
            raise MachineError("missing tool: ssh", code="tool-missing", fix="apt-get install openssh-client")
        words = ["ssh", "-F", str(self.config), *options]
        if self.user is not None:
            words += ["-l", self.user]
        words += ["--", host]
        if isinstance(command, str):
            (command,) = sendable([command])
            return [*words, command]
        return [*words, shlex.join(sendable(command))] if command else words


def write_ssh_files(inventory: Inventory, workspace: Workspace) -> None:
    """Write what ssh reads. Connections that are kept go by the file: it stays if nothing has changed."""
    changed = write_atomic(workspace.known_hosts, inventory.known_hosts())
    ssh_config = inventory.ssh_config(key=workspace.key, known_hosts=workspace.known_hosts)
    write_atomic(workspace.ssh_config, ssh_config, anew=changed)


def attached(argv: Sequence[str]) -> int:
    """Run a program on our own terminal and streams; its exit status, 128 + N if signal N ended it."""
    process = subprocess.Popen(argv)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # which lets ssh put the terminal right
            process.wait()
    return status if status >= 0 else _SIGNALLED - status


def captured(argv: Sequence[str]) -> Result:
    """Run a program on our stdin and keep what it says."""
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    return Result(done.returncode, done.stdout, done.stderr)
