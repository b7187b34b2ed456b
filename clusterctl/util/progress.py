"""Progress: what a phase reports while it runs, the functions that receive it, and the clock it waits by."""

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
    """A host has finished ``task``, one of ``of`` hosts (0: not known) that run it; ``how`` it went."""

    host: str
    task: str
    of: int = 0
    how: str = ""
    failed: bool = False

    def __str__(self) -> str:
        return ": ".join(part for part in (self.host, self.task, self.how) if part)


class Waiting(str):
    """A message that another command holds a lock: shown immediately, on a terminal or not."""

    __slots__ = ()


ProgressReporter = Callable[[str | HostStep], None]  # gets each message of a phase
LineReporter = Callable[[str], None]  # gets messages that concern no single host


class Reporter:
    """Where a verb tells what it does while it runs. This one shows nothing."""

    def step(self, phase: str) -> None:
        """Report that a phase of this name begins."""

    def progress(self, message: str | HostStep) -> None:
        """Report what the current phase does now."""

    def note(self, text: str) -> None:
        """Report a line that the user should read, at once."""


SILENT = Reporter()


def follow(steps: Generator[HostStep, None, T], reporter: Reporter) -> T:
    """Report the steps of something that runs while they are taken. Return its result."""
    with closing(steps):
        while True:
            try:
                reporter.progress(next(steps))
            except StopIteration as end:
                result: T = end.value
                return result


class PhaseLines(Reporter):
    """Passes on progress as lines: each phase as it begins, and hosts that fail.

    report: called with each line.
    verbose: whether every message of a phase is passed on.
    """

    def __init__(self, report: LineReporter, *, verbose: bool = False) -> None:
        self._report, self._verbose = report, verbose
        self._start = time.monotonic()
        self._failed: set[str] = set()
        self.phase = ""

    def step(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._report(self._stamped())

    def progress(self, message: str | HostStep) -> None:
        if self._verbose or isinstance(message, Waiting):
            self._report(f"{self._stamped()}: {message}")
        elif not isinstance(message, str) and message.failed and message.host not in self._failed:
            self._failed.add(message.host)
            self._report(f"failed on {message.host}: {message.task}")

    def note(self, text: str) -> None:
        self._report(text)

    def _stamped(self) -> str:
        return f"[{time.monotonic() - self._start:6.1f}s] {shown_phase(self.phase)}"


def shown_phase(name: str) -> str:
    """Return the name of a phase as people read it: ``probe hosts``."""
    return name.replace("_", " ")


def backoff(first_s: float = 0.2, factor: float = 1.4, longest_s: float = 15.0) -> Iterator[float]:
    """Ever longer pauses between two polls, in seconds: quick for short jobs, easy on Slurm for long ones."""
    pause = first_s
    while True:
        yield pause
        pause = min(pause * factor, longest_s)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, so that tests need not wait."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def polls(
        self, timeout_s: float | None, *, first_s: float = 0.2, longest_s: float = 15.0
    ) -> Iterator[None]:
        """One item for each look at something that is waited for, the last one when the time is up."""
        give_up = math.inf if timeout_s is None else self.now() + timeout_s
        for pause in backoff(first_s, longest_s=longest_s):
            yield
            if (left := give_up - self.now()) <= 0:
                return
            self.sleep(min(pause, left))


@dataclass(frozen=True, slots=True)
class Limit:
    """A moment by which something has to be done, by its clock."""

    until: float = math.inf
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def within(cls, seconds: float, clock: Clock | None = None) -> Limit:
        clock = clock or Clock()
        return cls(clock.now() + seconds, clock)

    @property
    def rest_s(self) -> float:
        """How long there still is; negative once it is over."""
        return self.until - self.clock.now()


NO_LIMIT = Limit()
