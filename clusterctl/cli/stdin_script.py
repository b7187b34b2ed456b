"""The script of `submit -`, which is read from stdin."""

from __future__ import annotations

import atexit
import hashlib
import sys
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

from clusterctl.errors import UsageError
from clusterctl.util.disk import translating_write_errors


def script_of_stdin() -> str:
    """Write the script on stdin to a file in the current folder, from which it is sent like any
    other script. Return the file's name. The file is removed when clusterctl ends.

    The name depends on the content alone, so that a dry run has the digest of the submission. Without
    a first line that names its program, the script is one of the shell.

    Raises:
        UsageError: stdin is empty.
        MachineError: the current folder can't be written.
    """
    text = sys.stdin.buffer.read()
    if not text.strip():
        raise UsageError(
            "there is no script on stdin",
            code="file-invalid",
            about="stdin",
            fix="pipe the script into `clusterctl submit -`",
        )
    stem = f"stdin-{hashlib.sha256(text).hexdigest()[:8]}"
    suffix = "" if text.startswith(b"#!") else ".sh"
    with translating_write_errors(Path.cwd()), _new_file(stem, suffix) as file:
        atexit.register(Path(file.name).absolute().unlink, missing_ok=True)
        file.write(text)
    return file.name


def _new_file(stem: str, suffix: str) -> BinaryIO:
    """Create a file with another name than that of a command that submits the same script now."""
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    for path in (Path(name + suffix) for name in names):
        with suppress(FileExistsError):
            path.touch(0o600, exist_ok=False)
            return path.open("wb")
    raise AssertionError
