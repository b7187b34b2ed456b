"""The ssh program, for a terminal, a forwarded port or much data. It reads the same `ssh_config`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import CommandError, MachineError, NoAnswerError, TransportError, UnreachableError
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import Conversation, Result, no_answer, sendable, shown
from clusterctl.transport.local import LocalTransport
from clusterctl.util.process import under_subreaper

if TYPE_CHECKING:
    from clusterctl.state.inventory import Inventory

# Options of a connection that lives and ends by itself, whatever others share, and has no terminal.
ALONE = ("-T", "-o", "ControlPath=none")
_SIGNALLED = 128
_LOST = 255  # ssh's own exit status for a connection that was not made or broke


@dataclass(frozen=True, slots=True)
class OpenSSH:
    """How ssh reaches the hosts of one `ssh_config`, as ``user`` (default: the one the file names)."""

    config: Path
    user: str | None = None

    def argv(self, host: str, command: Sequence[str] = (), *options: str) -> list[str]:
        """The command line that runs ``command`` on ``host``, or a login shell if it is empty.

        Raises:
            MachineError: there is no ssh on this machine.
            TransportError: the command can't be sent.
        """
        if shutil.which("ssh") is None:
            raise MachineError("missing tool: ssh", fix="apt-get install openssh-client")
        words = ["ssh", "-F", str(self.config), *options]
        if self.user is not None:
            words += ["-l", self.user]
        words += ["--", host]
        return [*words, shlex.join(sendable(command))] if command else words

    @contextmanager
    def converse(self, host: str, argv: Sequence[str], silence_s: float) -> Iterator[Conversation]:
        """Talk with a command over a connection of its own; see ``Transport.converse``.

        ssh ciphers in C, on a core of its own: it moves several times as much in a second as a channel of
        paramiko's. It takes 0.1 s more to begin, since it logs in again.
        """
        words = self.argv(host, argv, "-T", "-o", "BatchMode=yes")
        with LocalTransport().converse(under_subreaper(words), bulk=True, silence_s=silence_s) as talk:
            yield _Remote(talk, argv, host, silence_s)


def write_ssh_files(inventory: Inventory, workspace: Workspace) -> None:
    """Have our own account's way to these machines in the workspace."""
    write_atomic(workspace.known_hosts, inventory.known_hosts())
    ssh_config = inventory.ssh_config(key=workspace.key, known_hosts=workspace.known_hosts)
    write_atomic(workspace.ssh_config, ssh_config)


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


@dataclass(frozen=True, slots=True)
class _Remote:
    """The talk with our ssh, which speaks for the command: its errors are those of the command."""

    talk: Conversation
    argv: Sequence[str]
    host: str
    silence_s: float

    def send(self, data: bytes) -> None:
        with self._translating():
            self.talk.send(data)

    def receive(self) -> bytes:
        with self._translating():
            return self.talk.receive()

    def finish(self) -> None:
        with self._translating():
            self.talk.finish()

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except (CommandError, NoAnswerError) as exc:
            raise self._translated(exc) from exc

    def _translated(self, exc: CommandError | NoAnswerError) -> TransportError:
        if isinstance(exc, NoAnswerError):
            return no_answer(self.host, self.argv, self.silence_s)
        if exc.rc == _LOST:
            return UnreachableError(
                f"{self.host}: the connection broke during `{shown(self.argv)}`",
                why=exc.why,
                fix="`clusterctl up` starts it again if it is down",
                host=self.host,
            )
        what = f"`{shown(self.argv)}` failed with exit status {exc.rc}"
        return CommandError(what, rc=exc.rc, stderr=exc.why, where=self.host, host=self.host)
