"""The progress of `up` and `down`: phases, seconds, and what the hosts are at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from clusterctl.cli.show import Screen
from clusterctl.util.progress import WAITING, HostStep, Waiting

_FEW = 3  # hosts that are named; of more, how many


@dataclass(slots=True)
class _Phase:
    """One phase, as it stands."""

    name: str
    begun: float
    seconds: float | None = None  # once it is over
    text: str = ""
    hosts: dict[str, None] = field(default_factory=dict)  # all that were heard of
    done: dict[str, None] = field(default_factory=dict)  # those that are through with the task in ``text``
    of: int = 0

    def take(self, what: str | HostStep) -> None:
        """What is happening now."""
        if isinstance(what, str):
            self.text, self.done, self.of = what, {}, 0
            return
        if what.task != self.text:
            self.text, self.done = what.task, {}
        self.of = what.of
        self.done[what.host] = self.hosts[what.host] = None

    @property
    def progress(self) -> str:
        """``2/3 hosts, waiting for demo-train-2``; "" when hosts are not what it is about."""
        if not self.done:
            return ""
        if not self.of or len(self.done) >= self.of:
            return f"{len(self.done)} hosts" if len(self.done) > 1 else ", ".join(self.done)
        rest = [host for host in self.hosts if host not in self.done]
        if len(self.done) + len(rest) != self.of or len(rest) > _FEW:  # not all are known yet, or too many
            return f"{len(self.done)}/{self.of} hosts"
        return f"{len(self.done)}/{self.of} hosts, waiting for {', '.join(rest)}"


class Phases:
    """Told by `up` and `down` what they are at. A picture that moves on a terminal, elsewhere lines."""

    def __init__(self, screen: Screen, *, verbose: bool) -> None:
        self.begun = False
        self._screen = screen
        self._verbose = verbose
        self._start = time.monotonic()
        self._phases: list[_Phase] = []
        self._waiting = ""  # for another clusterctl
        self._moving = False
        self._failed: set[str] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it, until the end of the ``with``."""
        with self._screen.moving(self.picture) as self._moving:
            yield
        self._moving = False

    def __call__(self, phase: str, what: str | HostStep) -> None:
        if phase == WAITING:
            self._waiting = str(what)
            self._screen.note(self._waiting)
            return
        self.begun, self._waiting = True, ""
        if not self._phases or self._phases[-1].name != phase:
            self._begin(phase)
        if what:
            self._phases[-1].take(what)
            self._say(phase, what)

    def _begin(self, phase: str) -> None:
        now = time.monotonic()
        if self._phases:
            self._phases[-1].seconds = now - self._phases[-1].begun
        self._phases.append(_Phase(phase, now))
        if not self._moving:
            self._screen.note(self._stamped(phase))

    def _say(self, phase: str, what: str | HostStep) -> None:
        """Detail for those who want it; a host that failed, at once and for everybody."""
        failed = isinstance(what, HostStep) and what.failed
        if self._verbose or isinstance(what, Waiting):
            self._screen.note(f"{self._stamped(phase)}: {what}")
        elif failed and isinstance(what, HostStep) and what.host not in self._failed:
            self._failed.add(what.host)
            self._screen.note(f"failed on {what.host}: {what.task}")

    def _stamped(self, phase: str) -> str:
        return f"[{time.monotonic() - self._start:6.1f}s] {phase}"

    def picture(self) -> list[str]:
        """A line a phase."""
        now = time.monotonic()
        lines = []
        for phase in self._phases:
            over = phase.seconds is not None
            seconds = phase.seconds if phase.seconds is not None else now - phase.begun
            said = "" if over else "  ".join(part for part in (phase.progress, phase.text) if part)
            lines.append(_line(" " if over else _turning(now), phase.name, seconds, said))
        if self._waiting:
            lines.append(_line(_turning(now), "waiting", now - self._start, self._waiting))
        return lines


def _line(mark: str, name: str, seconds: float, said: str) -> str:
    return f"{mark} {name:<9} {seconds:6.1f} s  {said}".rstrip()


def _turning(now: float) -> str:
    return "|/-\\"[int(now * 8) % 4]
