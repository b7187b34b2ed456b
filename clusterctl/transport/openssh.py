"""Programs that we talk with, and the ssh program, which reads our `ssh_config`."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import CommandError, MachineError, TransportError, UnreachableError
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import (
    ENDED_BY_SIGNAL,
    MARK,
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
# Bytes that a login shell's startup files may print.
_MOST_NOISE = 1 << 20
_PAUSE_MS = 50


@contextmanager
def talking(
    words: Sequence[str],
    *,
    silence_s: float,
    stdin: int = subprocess.PIPE,
    remote: tuple[str, Sequence[str]] | None = None,
    script: bytes = b"",
) -> Iterator[Conversation]:
    """Start a program and talk with it.

    remote: the host and the command that the program, which is ssh, runs there. ``script`` is what the
    command's `wrapped` line reads first.
    """
    host, argv = remote or ("localhost", words)
    with running(words, stdin=stdin, is_ssh=remote is not None) as process:
        talk = Talk(host, argv, process, silence_s, is_ssh=remote is not None, is_wrapped=bool(script))
        if script:
            talk.send(script)
        yield talk


@contextmanager
def running(
    words: Sequence[str], *, stdin: int = subprocess.PIPE, cwd: Path | None = None, is_ssh: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program with pipes, which is killed at the end of the ``with``, and its children with it.

    is_ssh: it is ssh, which also ends when this process is killed, and with it the command on the host.

    Raises:
        CommandError: it can't be started.
    """
    try:
        process = subprocess.Popen(
            words,
            bufsize=0,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            process_group=ending_with_us() if is_ssh else 0,
        )
    except OSError as exc:
        raise CommandError(
            f"can't run `{shown(words)}`", code="tool-missing", rc=_NOT_FOUND, stderr=str(exc)
        ) from exc
    with process:
        for pipe in filter(None, (process.stdin, process.stdout)):
            enlarge(pipe.fileno())
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
        try:
            yield process
        finally:
            if is_ssh:
                process.kill()
            elif process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def ending_with_us() -> int:
    """Return a process group that is killed once this process has ended, however it ends."""
    return _leader(os.getpid()).pid


@cache
def _leader(_owner: int) -> subprocess.Popen[bytes]:
    """Return the leader of that process group of a process, which is given."""
    # No program inherits the end that stays open, so the kernel closes it when this process ends.
    reading, _ = os.pipe()
    nothing = subprocess.DEVNULL
    words = ["sh", "-c", "read -r _; kill -KILL 0"]
    try:
        return subprocess.Popen(words, stdin=reading, stdout=nothing, stderr=nothing, process_group=0)
    finally:
        os.close(reading)


@dataclass(slots=True)
class Talk:
    """A program that runs; see ``Conversation``.

    silence_s: seconds without a byte after which the program is given up. ``deadline`` is the time at which
    it is given up in any case, as `time.monotonic` has it. ``is_ssh``: it is the ssh program. ``is_wrapped``:
    its output begins after ``MARK``.
    """

    host: str
    argv: Sequence[str]
    process: subprocess.Popen[bytes]
    silence_s: float
    _: KW_ONLY
    deadline: float | None = None
    is_ssh: bool = False
    is_wrapped: bool = False
    most_stderr: int = _STDERR_TAIL
    _noise: bytearray = field(default_factory=bytearray, init=False)
    _stderr: bytearray = field(default_factory=bytearray, init=False)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None  # noqa: S101  # it is a pipe
        fd, left = self.process.stdin.fileno(), memoryview(data)
        try:
            while left:
                self._ready({fd: select.POLLOUT})
                left = left[os.write(fd, left) :]
        except BrokenPipeError:
            self.finish()
            raise failed(self.host, self.argv, 0, "it ended before it had read all") from None

    def receive(self) -> bytes:
        assert self.process.stdout is not None  # noqa: S101
        while True:
            self._ready({self.process.stdout.fileno(): select.POLLIN})
            if (data := self._read()) is not None:
                return data

    def exchange(self, stdin: bytes, most: int, *, close: bool) -> bytes:
        """Return what the program prints. Meanwhile it gets its stdin, which it need not read to the end.

        close: close its stdin after that.

        Raises:
            TransportError: it prints more than ``most`` bytes.
        """
        assert self.process.stdin is not None  # noqa: S101
        assert self.process.stdout is not None  # noqa: S101
        output, left, fd = bytearray(), memoryview(stdin), self.process.stdin.fileno()
        wanted = {self.process.stdout.fileno(): select.POLLIN} | ({fd: select.POLLOUT} if left else {})
        while len(output) <= most:
            ready = self._ready(wanted)
            if fd in ready:
                try:
                    left = left[os.write(fd, left) :]
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    del wanted[fd]
                    if close:
                        self.process.stdin.close()
            if self.process.stdout.fileno() in ready:
                if (data := self._read()) == b"":
                    return bytes(output)
                output += data or b""
        what = f"`{shown(self.argv)}` said more than {most} bytes"
        raise TransportError(what, code="connection-failed", where=self.host, host=self.host)

    def finish(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        while self.receive():
            pass
        self.ended()

    def ended(self) -> None:
        """Raises unless the command, whose stdout is at its end, exits with 0."""
        if (rc := self.status()) != 0:
            raise failed(self.host, self.argv, rc, self.complaint())

    def status(self) -> int:
        """Return the exit status of the command, whose stdout is at its end.

        Raises:
            NoAnswerError: it does not end.
            UnreachableError: the connection broke.
        """
        assert self.process.stderr is not None  # noqa: S101
        poll = select.poll()
        poll.register(self.process.stderr, select.POLLIN)
        started = time.monotonic()
        while self.process.poll() is None:
            if poll.poll(_PAUSE_MS) and not self._hear():
                break
            if time.monotonic() > self._limit(started):
                raise self._silent()
        while poll.poll(0) and self._hear():
            pass
        try:
            rc = max(self.process.wait(max(0.0, self._limit(started) - time.monotonic())), ENDED_BY_SIGNAL)
        except subprocess.TimeoutExpired as exc:
            raise self._silent() from exc
        return self._status(rc)

    def complaint(self) -> str:
        """Return the end of its stderr, once it has ended."""
        return self._stderr.decode(errors="replace")

    def _status(self, rc: int) -> int:
        """Return what an exit status means; raises UnreachableError if the connection broke."""
        if self.is_ssh and rc == NO_CONNECTION:
            what = f"{self.host}: the connection broke during `{shown(self.argv)}`"
            fix = "`clusterctl up` starts it again if it is down"
            raise UnreachableError(what, why=self.complaint(), fix=fix, host=self.host)
        return rc

    def _read(self) -> bytes | None:
        """Read some of its output; None if that is only what precedes the output of the command."""
        assert self.process.stdout is not None  # noqa: S101
        data = os.read(self.process.stdout.fileno(), READ)
        if not self.is_wrapped:
            return data
        self._noise += data
        _, mark, rest = self._noise.partition(MARK)
        self.is_wrapped = not mark
        if not mark and (not data or len(self._noise) > _MOST_NOISE):
            raise self._without_mark(bytes(self._noise))
        return bytes(rest) or None

    def _without_mark(self, noise: bytes) -> TransportError:
        """Return the error of a login shell that did not come to the command."""
        if len(noise) <= _MOST_NOISE and (rc := self.status()) not in {0, NO_CONNECTION}:
            return failed(self.host, self.argv, rc, self.complaint() + noise.decode(errors="replace"))
        return TransportError(
            f"the login shell did not run `{shown(self.argv)}`",
            code="connection-failed",
            where=self.host,
            why=noise[-500:].decode(errors="replace"),
            fix="look at what the account's startup files there do, such as ~/.bashrc",
            host=self.host,
        )

    def _ready(self, wanted: dict[int, int]) -> set[int]:
        """Wait until some pipes of the program are ready, or at their end; return those."""
        assert self.process.stderr is not None  # noqa: S101
        poll = select.poll()
        for fd, event in wanted.items():
            poll.register(fd, event)
        stderr = self.process.stderr.fileno()
        poll.register(stderr, select.POLLIN)
        started = time.monotonic()
        while True:
            ready = {fd for fd, _ in poll.poll(max(0.0, self._limit(started) - time.monotonic()) * 1000)}
            if not ready:
                raise self._silent()
            if stderr in ready and not self._hear():
                poll.unregister(stderr)
            if ready := ready & set(wanted):
                return ready

    def _hear(self) -> bool:
        """Read some of its stderr, of which the end is kept; return False at its end."""
        assert self.process.stderr is not None  # noqa: S101
        chunk = os.read(self.process.stderr.fileno(), READ)
        self._stderr += chunk
        del self._stderr[: -self.most_stderr]
        return bool(chunk)

    def _limit(self, started: float) -> float:
        """Return when the program is given up that has been silent since ``started``."""
        return self.deadline if self.deadline is not None else started + self.silence_s

    def _silent(self) -> TransportError:
        return no_answer(self.host, self.argv, self.silence_s)


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
        words = ["ssh", "-F", str(self.config.absolute()), *options]
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
