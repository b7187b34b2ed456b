"""The figures of a run as event files, which TensorBoard shows."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.errors import RankError, UsageError


class EventFile:
    """Scalars by name and iteration.

    Not by tensorboardX's SummaryWriter: a full disk ends its thread with a traceback, and lets the rank wait
    for that thread for ever.
    """

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        """
        Args:
            done: iterations; what the folder has of later ones, TensorBoard no longer shows.

        Raises:
            UsageError: tensorboardX is not installed, or the folder cannot be written.
        """
        try:
            files = importlib.import_module("tensorboardX.event_file_writer")
            self._scalar: Any = importlib.import_module("tensorboardX.summary").scalar
            self._protocol: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        except ImportError as exc:
            raise UsageError(
                f"--tensorboard: {exc}; install payload/requirements.lock", code="tensorboard-missing"
            ) from exc
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: Any = files.EventsWriter(str(folder / "events"))
            if done:
                log = self._protocol.SessionLog
                self._add(done + 1, session_log=log(status=log.START))
            self._file.flush()
        except OSError as exc:
            raise UsageError(
                f"--out: {folder} cannot be written: {exc.strerror}", code="file-unwritable"
            ) from exc

    def write(self, group: str, step: int, fields: Mapping[str, float | None]) -> None:
        """Add what is known of the fields, each as ``group/name``.

        Raises:
            RankError: the disk is full, say.
        """
        try:
            for name, value in fields.items():
                if value is not None:
                    self._add(step, summary=self._scalar(f"{group}/{name}", value))
            self._file.flush()
        except OSError as exc:
            raise self._refusal(exc) from exc

    def close(self) -> None:
        """When all of it is on disk.

        Raises:
            RankError: it cannot be written.
        """
        try:
            self._file.close()
        except OSError as exc:
            raise self._refusal(exc) from exc

    def _add(self, step: int, **what: Any) -> None:
        self._file.write_event(self._protocol.Event(wall_time=time.time(), step=step, **what))

    def _refusal(self, exc: OSError) -> RankError:
        return RankError(f"--out: {self._folder} cannot be written: {exc.strerror}", code="file-unwritable")
