"""Requirements files as far as we must know them: which files belong to one, and what is in them.

What a line means is pip's affair. Here it only matters whether an answer of pip's still answers the question.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.state.journal import digest

_MAX_BYTES: Final = 4 << 20
_INCLUDE: Final = re.compile(r"^(?:-r|--requirement|-c|--constraint)(?:\s+|\s*=\s*|(?<=-[rc]))(.+)$")
_COMMENT: Final = re.compile(r"(^|\s+)#.*$")


def question(files: Sequence[Path]) -> str:
    """A hash of all that decides what pip makes of these files, but for what its indexes hold.

    That is the files, those that they include, the wheels on this machine that they name, and the PIP_*
    variables.

    Raises:
        UsageError: one of the files can't be read.
    """
    settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("PIP_")]
    contents = [part for file in files for pair in _contents(file, frozenset()) for part in pair]
    return digest(*settings, "", *contents)


def content(files: Sequence[Path]) -> str:
    """A hash of what these files and those that they include say, wherever they lie.

    Raises:
        UsageError: one of the files can't be read.
    """
    return digest(*(said for file in files for _, said in _contents(file, frozenset())))


def _contents(file: Path, seen: frozenset[Path], named_in: str = "") -> Iterator[tuple[bytes, bytes]]:
    """What is in a file and in those that it includes, each with the folder that its relative paths mean."""
    file = file.absolute()
    if file in seen:
        return
    raw = _read(file, named_in)
    yield str(file.parent).encode(errors="surrogateescape"), raw
    for number, line in _lines(raw.decode(errors="replace")):
        if found := _INCLUDE.match(line):
            name = found[1].strip("\"'")
            if "://" not in name:
                yield from _contents(file.parent / name, seen | {file}, f"{file}:{number}")
        elif (wheel := _local_wheel(line, file.parent)) is not None:
            yield b"", _hash_of(wheel, f"{file}:{number}")


def _read(file: Path, named_in: str) -> bytes:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a null byte
        raise UsageError(
            f"the requirements file {file} can't be read",
            where=named_in,
            why=getattr(exc, "strerror", None) or str(exc),
            fix="name a file in pip's requirements format",
        ) from exc
    if len(raw) > _MAX_BYTES:
        raise UsageError(
            f"the requirements file {file} is larger than {_MAX_BYTES >> 20} MiB",
            where=named_in,
            fix="name a file in pip's requirements format",
        )
    return raw


def _hash_of(wheel: Path, named_in: str) -> bytes:
    try:
        with wheel.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError as exc:
        raise UsageError(
            f"the wheel {wheel} can't be read",
            where=named_in,
            why=exc.strerror or str(exc),
            fix="make it readable, or leave the line out",
        ) from exc


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines without comments, each with the number of its first line."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start if joined else number
        joined += _COMMENT.sub("", line)
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if joined.strip():
            yield start, joined.strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()


def _local_wheel(line: str, folder: Path) -> Path | None:
    """The wheel on this machine that a line names, if it names one: it may change under its name."""
    name = re.split(r"\s*;|\s+--|\s+$", line.rpartition(" @ ")[2].strip())[0].removeprefix("file://")
    path = folder / name
    return path if name.endswith(".whl") and "://" not in name and os.path.isfile(path) else None  # noqa: PTH113
