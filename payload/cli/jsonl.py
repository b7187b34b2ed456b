"""JSON, one object a line: in files, and on stdout. Standard library only."""

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
    """Print one JSON object, in a line of its own."""
    print_line(json.dumps(fields))


def print_line(line: str) -> None:
    """Print a line, and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class JsonLines:
    """A file of JSON objects, flushed after each, so that a run that is killed leaves what it had done."""

    def __init__(self, path: Path, *, keep: Keep | None = None) -> None:
        """Start the file anew, or go on with it; make its folder where there is none.

        Args:
            keep: which of the objects that the file has already to go on after; None: none of them.

        Raises:
            UsageError: it cannot be written.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep and path.exists():
                _thin_out(path, keep)
            # Nothing is left to be written when it is closed, which would fail once more.
            self._file: BinaryIO = path.open("ab" if keep else "wb", buffering=0)
        except OSError as exc:
            raise UsageError(
                f"--out: {path} cannot be written: {exc.strerror}", code="file-unwritable"
            ) from exc

    def write(self, kind: str, **fields: Any) -> None:
        """Add one object, with the time in Unix seconds.

        Raises:
            RankError: the disk is full, say.
        """
        line = json.dumps({"kind": kind, "time": time.time(), **fields}, allow_nan=False)
        left = memoryview(f"{line}\n".encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as exc:
            raise RankError(
                f"--out: {self._path} cannot be written: {exc.strerror}", code="file-unwritable"
            ) from exc

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _thin_out(path: Path, keep: Keep) -> None:
    """Leave only some objects in a file, which is the old or the new one at any moment."""
    new = path.with_name(f"{path.name}.new")
    with path.open("rb") as old, new.open("wb") as kept:
        kept.writelines(line for line in old if (record := _record(line)) and keep(record))
    new.replace(path)


def _record(line: bytes) -> dict[str, Any] | None:
    """None for what is no whole object, as a run or a node leaves that was ended while it wrote."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None
