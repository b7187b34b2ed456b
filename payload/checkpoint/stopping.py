"""Requests to stop: SIGTERM and SIGUSR1, which Slurm sends before it takes a job's nodes away."""

from __future__ import annotations

import signal
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers that one came, until an iteration is done."""

    def __init__(self) -> None:
        self.came = False
        self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}

    def close(self) -> None:
        """Treat them as before; once one came, the run ends, and no other may disturb that."""
        if not self.came:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.came = True
