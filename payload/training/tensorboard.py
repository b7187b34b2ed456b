"""The metrics of a run as TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.errors import RankError, UsageError


class EventFile:
    """A file of scalars by name and iteration, which TensorBoard shows.

    tensorboardX's SummaryWriter is not used: on a full disk its thread ends with a traceback, and
    the rank then waits for that thread forever.
    """

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        """Open the event file.

        done: the iteration from which a run resumes: TensorBoard hides the earlier run's later
            iterations.

        Raises UsageError if tensorboardX is not installed, or the folder cannot be written.
        """
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
            from tensorboardX.summary import scalar
        except ImportError as exc:
            raise UsageError(
                f"--tensorboard: {exc}; run pip install -r payload/requirements.lock",
                code="tensorboard-missing",
            ) from exc
        self._folder = folder
        self._scalar = scalar
        self._protocol = event_pb2
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = EventsWriter(str(folder / "events"))
            if done:
                log = self._protocol.SessionLog
                self._add(done + 1, session_log=log(status=log.START))
            self._file.flush()
        except OSError as exc:
            raise UsageError(
                f"--out: {folder} cannot be written: {exc.strerror}", code="file-unwritable"
            ) from exc

    def write(self, group: str, step: int, fields: Mapping[str, float | None]) -> None:
        """Write each field that is not None as the scalar ``group/name``. Raises RankError if that
        fails.
        """
        try:
            for name, value in fields.items():
                if value is not None:
                    self._add(step, summary=self._scalar(f"{group}/{name}", value))
            self._file.flush()
        except OSError as exc:
            raise self._write_error(exc) from exc

    def close(self) -> None:
        """Write everything to disk and close the file. Raises RankError if that fails."""
        try:
            self._file.close()
        except OSError as exc:
            raise self._write_error(exc) from exc

    def _add(self, step: int, **content: Any) -> None:
        self._file.write_event(self._protocol.Event(wall_time=time.time(), step=step, **content))

    def _write_error(self, exc: OSError) -> RankError:
        return RankError(
            f"--out: {self._folder} cannot be written: {exc.strerror}", code="file-unwritable"
        )
