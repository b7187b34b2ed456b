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

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        """Treat them as before; once one came, to any rank, the run ends, and no other may disturb that.

        srun sends SIGTERM to the ranks that leave after the first. Python forgets its handlers as it leaves,
        but not what is to be ignored.
        """
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.came else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.came = True
