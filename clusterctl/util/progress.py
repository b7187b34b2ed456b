"""Progress reports of phases, the functions that receive them, and clocks and limits for
waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostStep:
    """A task that a host has finished. how: its result. of: number of hosts in this phase; 0:
    unknown.
    """

    host: str
    task: str
    of: int = 0
    how: str = ""
    failed: bool = False

    def __str__(self) -> str:
        return ": ".join(part for part in (self.host, self.task, self.how) if part)


class LockMessage(str):
    """Message that a command waits, for a lock or a host. It is shown even if other progress is not."""

    __slots__ = ()


ProgressReporter = Callable[[str | HostStep], None]
# Called with messages that do not concern a single host.
LineReporter = Callable[[str], None]


class Reporter:
    """Receiver of the progress of a command, which consists of phases. This base class shows
    nothing.
    """

    def step(self, phase: str) -> None:
        """Report that this phase begins."""

    def progress(self, message: str | HostStep) -> None:
        """Report the current activity of the phase."""

    def note(self, text: str) -> None:
        """Report a line that the user should read at once."""


SILENT = Reporter()


def report_steps(steps: Generator[HostStep, None, T], reporter: Reporter) -> T:
    """Run a generator, report each step that it yields as progress, and return its result."""
    with closing(steps):
        while True:
            try:
                reporter.progress(next(steps))
            except StopIteration as end:
                result: T = end.value
                return result


class PhaseLines(Reporter):
    """Reporter that passes a line to a function when a phase begins, and when a host fails.

    verbose: whether it also passes every message of a phase.
    """

    def __init__(self, report: LineReporter, *, verbose: bool = False) -> None:
        self._report = report
        self._verbose = verbose
        self._start = time.monotonic()
        self._failed: set[str] = set()
        self.phase = ""

    def step(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._report(self._stamped())

    def progress(self, message: str | HostStep) -> None:
        if self._verbose or isinstance(message, LockMessage):
            self._report(f"{self._stamped()}: {message}")
        if not isinstance(message, str) and message.failed and message.host not in self._failed:
            self._failed.add(message.host)
            self._report(f"failed on {message.host}: {message.task}")

    def note(self, text: str) -> None:
        self._report(text)

    def _stamped(self) -> str:
        return f"[{time.monotonic() - self._start:6.1f}s] {shown_phase(self.phase)}"


class MessageLines(Reporter):
    """Reporter that passes every message to a function."""

    def __init__(self, report: LineReporter) -> None:
        self._report = report

    def progress(self, message: str | HostStep) -> None:
        self._report(str(message))

    def note(self, text: str) -> None:
        self._report(text)


def shown_phase(name: str) -> str:
    """Return the name of a phase as shown to users: ``probe hosts``."""
    return name.replace("_", " ")


def backoff(first_s: float = 0.2, factor: float = 1.4, longest_s: float = 15.0) -> Iterator[float]:
    """Yield growing pauses between polls, in seconds: short for short jobs, long to spare Slurm."""
    pause = first_s
    while True:
        yield pause
        pause = min(pause * factor, longest_s)


@dataclass(frozen=True, slots=True)
class Clock:
    """Source of time, replaced in tests so that they need not wait."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def polls(
        self, timeout_s: float | None, *, first_s: float = 0.2, longest_s: float = 15.0
    ) -> Iterator[None]:
        """Yield before each poll, and sleep between polls, until ``timeout_s`` (if given) has
        passed.
        """
        give_up = math.inf if timeout_s is None else self.now() + timeout_s
        for pause in backoff(first_s, longest_s=longest_s):
            yield
            if (left := give_up - self.now()) <= 0:
                return
            self.sleep(min(pause, left))


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time by which an operation must be complete, as seconds of ``clock``."""

    until: float = math.inf
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def within(cls, seconds: float, clock: Clock | None = None) -> Deadline:
        clock = clock or Clock()
        return cls(clock.now() + seconds, clock)

    @property
    def rest_s(self) -> float:
        """Seconds until the limit; negative once it has passed."""
        return self.until - self.clock.now()


NO_LIMIT = Deadline()
