"""Files of one JSON object a line. Standard library only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from payload.errors import UsageError


class JsonLines:
    """A file of JSON objects, flushed after each, so that a run that is killed leaves what it had done."""

    def __init__(self, path: Path, *, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        """Start the file anew, or go on with it; make its folder where there is none.

        Args:
            keep: which of the objects that the file has already to go on after; None: none of them.

        Raises:
            UsageError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep and path.exists():
                _thin_out(path, keep)
            self._file: TextIO = path.open("a" if keep else "w", encoding="utf-8")
        except OSError as exc:
            raise UsageError(f"--out: {path} cannot be written: {exc.strerror}") from exc

    def write(self, kind: str, **fields: Any) -> None:
        """Add one object, with the time in Unix seconds."""
        line = json.dumps({"kind": kind, "time": time.time(), **fields}, allow_nan=False)
        self._file.write(f"{line}\n")
        self._file.flush()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _thin_out(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Leave only some objects in a file, which is the old or the new one at any moment."""
    new = path.with_name(f"{path.name}.new")
    with path.open(encoding="utf-8") as old, new.open("w", encoding="utf-8") as kept:
        # What was being written when a run was killed has no end of line.
        kept.writelines(line for line in old if line.endswith("\n") and keep(json.loads(line)))
    new.replace(path)
