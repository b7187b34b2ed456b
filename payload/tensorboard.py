"""The figures of a run as event files, which TensorBoard shows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from payload.errors import UsageError


class EventFile:
    """Scalars by name and iteration."""

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        """
        Args:
            done: iterations; what the folder has of later ones, TensorBoard no longer shows.

        Raises:
            UsageError: tensorboardX is not installed, or the folder cannot be written.
        """
        try:
            tensorboardx = importlib.import_module("tensorboardX")
        except ImportError as exc:
            raise UsageError(f"--tensorboard: {exc}; install payload/requirements.lock") from exc
        try:
            self._writer: Any = tensorboardx.SummaryWriter(str(folder), purge_step=done + 1 if done else None)
        except OSError as exc:
            raise UsageError(f"--out: {folder} cannot be written: {exc.strerror}") from exc

    def write(self, group: str, step: int, fields: Mapping[str, float | None]) -> None:
        """Add what is known of the fields, each as ``group/name``."""
        for name, value in fields.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Until all of it is on disk."""
        self._writer.close()
