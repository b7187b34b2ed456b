"""The script of `submit -`, which is read from stdin."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.util.disk import translating_write_errors


def script_of_stdin() -> str:
    """Write the script on stdin to a file in the current folder, from which it is sent like any
    other script. Return the file's name. The file is removed when clusterctl ends.

    Raises:
        UsageError: stdin is empty.
        MachineError: the current folder can't be written.
    """
    text = sys.stdin.buffer.read()
    if not text.strip():
        raise UsageError(
            "there is no script on stdin",
            code="stdin-empty",
            fix="pipe the script into `clusterctl submit -`",
        )
    with translating_write_errors(Path.cwd()):
        descriptor, name = tempfile.mkstemp(prefix="stdin-", dir=".")
        atexit.register(Path(name).absolute().unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
    return os.path.basename(name)
