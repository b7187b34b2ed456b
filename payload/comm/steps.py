"""Collectives written as generators: each ``yield`` hands over the requests to wait for before the next step.

So one text of an algorithm runs both blocking and, moved on between two layers, beside the computation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol


class Request(Protocol):
    """What mpi4py gives for a message or collective under way."""

    def Test(self) -> bool: ...  # noqa: N802

    def Wait(self) -> object: ...  # noqa: N802


Steps = Generator[Sequence[Request], None, None]


class Running:
    """A collective that has been started, as a ``Pending``."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._waiting: list[Request] = []
        self._done = False
        self._advance()

    def test(self) -> bool:
        while not self._done:
            while self._waiting:
                if not self._waiting[-1].Test():
                    return False
                self._waiting.pop()
            self._advance()
        return True

    def wait(self) -> None:
        while not self._done:
            while self._waiting:
                self._waiting.pop().Wait()
            self._advance()

    def _advance(self) -> None:
        try:
            self._waiting = list(next(self._steps))
        except StopIteration:
            self._done = True


def run(steps: Steps) -> None:
    """The whole collective, now."""
    Running(steps).wait()
