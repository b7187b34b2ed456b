"""Files of one JSON object a line. Standard library only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from payload.errors import UsageError


class JsonLines:
    """A file of JSON objects, flushed after each, so that a run that is killed leaves what it had done."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        """Start the file anew, or go on with it; make its folder where there is none.

        Raises:
            UsageError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a" if append else "w", encoding="utf-8")
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
