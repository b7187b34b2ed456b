"""Errors of disks that can't be written: full, read-only, failing, or over quota."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clusterctl.errors import DiskError, MachineError, printable

# Fixes for errors that concern the whole file system.
_FIXES = {
    errno.ENOSPC: "remove unneeded files on {place}",
    errno.EDQUOT: "remove some of your files on {place}, or ask for a larger quota",
    errno.EROFS: "mount {place} writable (`dmesg` shows whether an error made it read-only)",
    errno.EIO: "check the disk of {place} (`dmesg` shows the error)",
}
REFUSALS = frozenset(_FIXES)


@contextmanager
def translating_write_errors(path: Path) -> Iterator[None]:
    """Translate each OSError of the ``with`` block, which writes the file ``path``.

    Raises:
        DiskError: the file system is full, read-only, failing, or over quota.
        MachineError: the file can't be written for another reason, such as its mode.
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
            fix=f"make {path} writable for your account, then run the command again",
        ) from exc


def disk_error(exc: OSError, path: Path | None = None) -> DiskError:
    """Return the error for a disk that can't be written. path: the file."""
    if path is None and isinstance(exc.filename, str):
        path = Path(exc.filename)
    unknown = "the full or unwritable disk (`df -h` and `df -i` show it)"
    mount_point = unknown if path is None else _mount_point(path)
    fix = f"{_FIXES[exc.errno or errno.EIO].format(place=mount_point)}, then run the command again"
    if path is None:
        return DiskError("a file can't be written", why=exc.strerror or str(exc), fix=fix)
    reason = write_error_reason(exc, path)
    return DiskError(f"{path.name} can't be written", where=str(path), why=reason, fix=fix)


def file_error(exc: BaseException) -> MachineError | None:
    """Return the error for a failure that the system reports of a file or a disk: it is unwritable or
    failing, is a folder, or the user's account may not use it. None: it is another failure.
    """
    if isinstance(exc, OSError) and exc.errno in REFUSALS:
        return disk_error(exc)
    if not isinstance(exc, OSError) or not isinstance(exc.filename, str | bytes):
        return None
    path = printable(os.fsdecode(exc.filename))
    why = exc.strerror or str(exc)
    if isinstance(exc, PermissionError):
        return MachineError(
            f"your account may not use {path}",
            code="access-denied",
            about="path",
            where=path,
            why=why,
            fix=f"choose another path, or change the permissions (`namei -l {path}` shows them)",
        )
    if isinstance(exc, IsADirectoryError):
        return MachineError(
            f"{path} is not a file",
            code="file-unreadable",
            where=path,
            why=why,
            fix=f"choose another path, or move the folder {path} away",
        )
    return None


def write_error_reason(exc: OSError, path: Path) -> str:
    """Return why a file could not be written. If the disk is full or unwritable, name its mount
    point.
    """
    cause = exc.strerror or str(exc)
    if exc.errno not in REFUSALS:
        return cause
    mount_point = _mount_point(path)
    status = os.statvfs(_existing(path))
    is_out = exc.errno == errno.ENOSPC and status.f_files > 0 and status.f_favail == 0
    return f"{cause}: {mount_point} has no inodes left" if is_out else f"{cause}: {mount_point}"


def write_error_fix(exc: OSError, path: Path) -> str:
    """Return the fix for a file that could not be written."""
    if fix := _FIXES.get(exc.errno or 0):
        return fix.format(place=_mount_point(path))
    if exc.errno in {errno.EACCES, errno.EPERM}:
        return f"change the permissions (`namei -l {printable(str(path))}` shows them)"
    return f"correct the path {printable(str(path))}"


def append_line(path: Path, line: str) -> None:
    """Append a line to a file and sync the file. After an error, the line may be incomplete in the
    file.
    """
    with translating_write_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            # A last line without a newline is the rest of an interrupted write: end it first.
            is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            data = b"\n" * is_torn + line.encode() + b"\n"
            # A disk that becomes full accepts a part, and reports the error for the rest.
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in each line of a file. Skip damaged lines. A missing file has no
    lines.
    """
    return (row for _, row in read_lines(path) if row is not None)


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number of each line of a file, and its JSON object; None if the line is damaged."""
    raw = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            row = None
            with suppress(ValueError, RecursionError):
                row = json.loads(line.decode())
            yield number, row if isinstance(row, dict) else None


def read_text(path: Path) -> str:
    """Return the text of a file that may be damaged or missing. Bytes that are no text are
    replaced.
    """
    return path.read_bytes().decode(errors="replace") if path.exists() else ""


def _mount_point(path: Path) -> Path:
    path = _existing(path).resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_mount())


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
