"""File names that are valid on Linux and break careless programs, and very deep folders."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.remains import marked

HOSTILE_NAMES = (
    b"two words",
    b"new\nline",
    b"-rf",
    b"--",
    b"$(touch pwned); `id`",
    b'it\'s "quoted"',
    b"back\\slash",
    b"\xff\xfe not utf-8",
    "\u00e9\u202e".encode(),
    b"*?[a]",
    b"~",
    b"...",
    b"..a",
    b"'",
    b'"',
    b"tab\t",
    b"\x1b[31mred",
    b"\x07",
    b"#x",
    b"!x",
    b" ",
    b"x" * 255,
)


@contextmanager
def deep_folder() -> Iterator[Path]:
    """A temporary folder for a tree that is too deep for pytest to remove.

    pytest ends in a RecursionError where an older run left one in its folder; `make clean-machines`
    removes this one.
    """
    folder = tempfile.mkdtemp(prefix=marked("deep-"))
    try:
        yield Path(folder)
    finally:
        subprocess.run(["rm", "-rf", "--", folder], check=True)


def nest(top: Path) -> None:
    """Make folders in folders, deeper than Python's recursion, a path and a process's open files
    can be.
    """
    top.mkdir(parents=True)
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("deep", dir_fd=fd)
        below = os.open("deep", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
