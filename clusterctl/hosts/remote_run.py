"""Functions of the programs that probe a host: run a command, read a file. Works with Python
3.6.
"""

import os
import subprocess
from typing import Optional, Sequence

from clusterctl.util.remote_rights import read_regular

ASK_S = 10


def run(argv: Sequence[str], timeout_s: float = ASK_S, *, any_exit: bool = False) -> Optional[str]:
    """Return a command's stdout; None if it takes too long or can't start, or fails without
    ``any_exit``.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ, LC_ALL="C"),
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # A program that waits for a file server can't always be killed, so its end is not awaited.
        process.kill()
        return None
    return output.decode("utf-8", "replace") if any_exit or process.returncode == 0 else None


def read(path: str) -> str:
    """Return the text of a regular file; "" if it does not exist."""
    try:
        return read_regular(path).decode("utf-8", "replace")
    except OSError:
        return ""
