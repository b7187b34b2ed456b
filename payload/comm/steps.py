"""Collectives written as generators: each ``yield`` hands over the requests to wait for before the next step.

So one text of an algorithm runs both blocking and, moved on between two layers, beside the computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol


class Request(Protocol):
    """What mpi4py gives for a message or collective under way."""

    def Test(self) -> bool: ...  # noqa: N802

    def Wait(self) -> object: ...  # noqa: N802


Steps = Generator[Sequence[Request], None, None]


class Last(list[Request]):
    """What an operation waits for that will start no further messages: the next in its lane may begin."""


class Operation:
    """Steps under way in a lane, as a ``Pending``."""

    def __init__(self, lane: Lane, steps: Steps) -> None:
        self._lane, self._steps = lane, steps
        self._waiting: list[Request] = []
        self.settled = False
        """It starts no further messages."""
        self.done = False

    def test(self) -> bool:
        if not self.done:
            self._lane.advance()
        return self.done

    def wait(self) -> None:
        if not self.done:
            self._lane.finish(self)

    def poll(self) -> None:
        """As far as goes without waiting."""
        while not self.done:
            while self._waiting:
                if not self._waiting[-1].Test():
                    return
                self._waiting.pop()
            self._next()

    def force(self, *, until_settled: bool = False) -> None:
        """To the end, or only so far that the next operation may begin."""
        while not (self.settled if until_settled else self.done):
            while self._waiting:
                self._waiting.pop().Wait()
            self._next()

    def _next(self) -> None:
        try:
            requests = next(self._steps)
        except StopIteration:
            self.settled = self.done = True
            return
        self.settled = self.settled or isinstance(requests, Last)
        self._waiting = list(requests)


class Lane:
    """The operations of one communicator.

    MPI and NCCL ask that all ranks start what belongs together in one order. An operation of several steps
    starts its later ones whenever it is moved on, which is at another time on every rank: so each operation
    begins when those before it have started all that they will.
    """

    def __init__(self) -> None:
        self.queue: deque[Operation] = deque()

    def start(self, steps: Steps) -> Operation:
        """Put an operation last, and begin it if it is its turn."""
        operation = Operation(self, steps)
        self.queue.append(operation)
        self.advance()
        return operation

    def run(self, steps: Steps) -> None:
        """A whole operation, now."""
        self.finish(self.start(steps))

    def advance(self) -> None:
        """Move all on as far as goes without waiting."""
        for operation in self.queue:
            operation.poll()
            if not operation.settled:
                break
        self._forget()

    def finish(self, wanted: Operation) -> None:
        """Wait for one operation."""
        for operation in self.queue:
            if operation is wanted:
                break
            operation.force(until_settled=True)
        wanted.force()
        self._forget()

    def _forget(self) -> None:
        while self.queue and self.queue[0].done:
            self.queue.popleft()
