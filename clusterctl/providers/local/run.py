"""How the helper runs the machine's own tools."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from clusterctl.errors import ProvisionError

# sudo's secure_path, or a user's PATH, may lack the places where ip, sshd and mount live.
TOOL_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}

_running: set[subprocess.Popen[str]] = set()


def run(argv: Sequence[str], *, what: str, stdin: str | None = None, where: str = "", fix: str = "") -> str:
    """Run a tool to its end and return its stdout. ``where`` and ``fix`` are for the error.

    Raises:
        ProvisionError: it failed; ``why`` is the end of what it said.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=TOOL_ENV,
        start_new_session=True,
    )
    _running.add(process)
    try:
        stdout, stderr = process.communicate(stdin)
    finally:
        _running.discard(process)
    if process.returncode != 0:
        said = (stderr or stdout).strip()[-1500:]
        if os.strerror(errno.ENOSPC) in said:
            fix = "make room on this machine: `df -h` and `df -i` show which disk is full"
        raise ProvisionError(
            f"{what} failed",
            where=where or " ".join(argv[:3]),
            why=said or f"exit {process.returncode}",
            fix=fix,
        )
    return stdout


def end_children() -> None:
    """End the tools that still run, with everything they started: the caller is gone."""
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
