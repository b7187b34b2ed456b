"""Errors of disks that can't be written (full, read-only, failing, over quota), in one place."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clusterctl.errors import DiskError, MachineError

# What to do where the file system takes nothing more, whichever file it is.
_FIXES = {
    errno.ENOSPC: "remove what is not needed on {place}",
    errno.EDQUOT: "remove files of yours on {place}, or have your quota raised",
    errno.EROFS: "mount {place} writable (`dmesg` tells whether an error made it read-only)",
    errno.EIO: "have the disk of {place} looked at (`dmesg` tells what is wrong with it)",
}
REFUSALS = frozenset(_FIXES)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Translate what goes wrong while the body writes ``path``.

    Raises:
        DiskError: the disk takes nothing more.
        MachineError: it can't be written for another reason, such as its mode.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in REFUSALS:
            raise disk_error(exc, path) from exc
        raise MachineError(
            f"{path.name} can't be written",
            code="file-unwritable",
            where=str(path),
            why=exc.strerror or str(exc),
            fix="make it writable for you, then run the same command again",
        ) from exc


def disk_error(exc: OSError, path: Path | None = None, *, what: str = "") -> DiskError:
    """One of ``REFUSALS`` for people; ``path`` is by default what the error names, if it names anything."""
    if path is None and isinstance(exc.filename, str):
        path = Path(exc.filename)
    unknown = "the disk that takes nothing more (`df -h` and `df -i` show it)"
    place = unknown if path is None else _mount_point(path)
    fix = f"{_FIXES[exc.errno or errno.EIO].format(place=place)}, then run the same command again"
    if path is None:
        return DiskError(what or "a file can't be written", why=exc.strerror or str(exc), fix=fix)
    return DiskError(what or f"{path.name} can't be written", where=str(path), why=reason(exc, path), fix=fix)


def reason(exc: OSError, path: Path) -> str:
    """Why a file could not be written, in words; of a disk that takes nothing more, which one that is."""
    why = exc.strerror or str(exc)
    if exc.errno not in REFUSALS:
        return why
    place = _mount_point(path)
    status = os.statvfs(_existing(path))
    is_out = exc.errno == errno.ENOSPC and status.f_files > 0 and status.f_favail == 0
    return f"{why}: {place} has no inodes left" if is_out else f"{why}: {place}"


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; it is on the disk when this returns. Of one that failed a part may be there."""
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # else this line would be lost with it
            data = b"\n" * torn + line.encode() + b"\n"
            while data:  # a disk that gets full takes a part, and says so only of the rest
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; none without the file. A torn line (power cut) is ignored."""
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        with suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def _mount_point(path: Path) -> Path:
    """Where the file system is mounted that has this path, or would have it."""
    path = _existing(path).resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_mount())


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
