"""The ssh program, for what needs a terminal or a forwarded port. It reads the same `ssh_config`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import MachineError
from clusterctl.transport.base import Result, sendable

# Options of a connection that lives and ends by itself, whatever others share, and has no terminal.
ALONE = ("-T", "-o", "ControlPath=none")
_SIGNALLED = 128


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
