"""JSON Lines: a JSON object per line, in files and on stdout. Standard library only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from payload.errors import RankError, UsageError

Keep = Callable[[dict[str, Any]], bool]


def answer(**fields: Any) -> None:
    """Print the fields as a line of JSON."""
    print_line(json.dumps(fields))


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class JsonLines:
    """A file of JSON objects, flushed after each object, so that the file of a killed run has all
    results.
    """

    def __init__(self, path: Path, *, keep: Keep | None = None) -> None:
        """Open the file, and create its folder if necessary. Raises UsageError if that fails.

        keep: returns whether to keep an object that is already in the file. None: overwrite the
            file.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep and path.exists():
                _keep_only(path, keep)
            # Without a buffer, closing the file has nothing to write and cannot fail.
            self._file: BinaryIO = path.open("ab" if keep else "wb", buffering=0)
        except OSError as exc:
            raise UsageError(
                f"--out: {path} cannot be written: {exc.strerror}", code="file-unwritable"
            ) from exc

    def write(self, kind: str, **fields: Any) -> None:
        """Append a JSON object with ``kind``, ``time`` (Unix seconds) and ``fields``, or raise
        RankError.
        """
        line = json.dumps({"kind": kind, "time": time.time(), **fields}, allow_nan=False)
        remaining = memoryview(f"{line}\n".encode())
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as exc:
            raise RankError(
                f"--out: {self._path} cannot be written: {exc.strerror}", code="file-unwritable"
            ) from exc

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


def _keep_only(path: Path, keep: Keep) -> None:
    """Remove from a file, atomically, all objects for which ``keep`` returns False."""
    new_path = path.with_name(f"{path.name}.new")
    with path.open("rb") as old_file, new_path.open("wb") as new_file:
        new_file.writelines(line for line in old_file if (record := _record(line)) and keep(record))
    new_path.replace(path)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return a line's JSON object. None: the line is not valid, for example because a process was
    killed.
    """
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None
