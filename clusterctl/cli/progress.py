"""What a person sees while a verb runs: the phases of `up` and `down`, and the progress of transfers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from clusterctl.cli.output import ENDINGS, SILENT_S, Screen
from clusterctl.errors import printable
from clusterctl.transport.tree import Progress, shown_size
from clusterctl.util.progress import HostStep, PhaseLines, shown_phase

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_LINE_EVERY_S: Final = 5.0


@contextmanager
def showing_progress(screen: Screen) -> Iterator[Progress]:
    """Something to tell the progress of a transfer to; nothing is shown with ``-o json``."""
    if screen.json:
        yield lambda *_: None
    elif sys.stderr.isatty():
        bar = screen.transfer_bar()
        try:
            yield bar
        finally:
            bar.stop()
    else:
        yield _Lines(screen)


class _Lines:
    """A line each few seconds."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._due = time.monotonic() + _LINE_EVERY_S
        # By what is done and how much: hashing is done more than once, of other files.
        self._begun: dict[tuple[str, int], tuple[float, int]] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        since, before = self._begun.setdefault((what, total), (now, done))
        if now < self._due or now - since < SILENT_S:
            return
        self._due = now + _LINE_EVERY_S
        rate = (done - before) / max(now - since, 0.001)
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
        self._screen.note(f"{what}: {shown_size(done)} of {shown_size(total)}, {shown_size(rate)}/s{left}")


# Up to so many hosts that are waited for are named. More are counted.
_FEW: Final = 3


@dataclass(slots=True)
class _Phase:
    """One phase, as it stands."""

    name: str
    task: str = ""
    hosts: dict[str, None] = field(default_factory=dict)  # all that were heard of
    through: dict[str, dict[str, None]] = field(default_factory=dict)  # task -> hosts
    of: int = 0

    @property
    def done(self) -> dict[str, None]:
        """The hosts that are through with ``task``; others may be at another one."""
        return self.through.setdefault(self.task, {})

    def take(self, what: str | HostStep) -> None:
        if isinstance(what, str):
            self.task, self.through, self.of = what, {}, 0
            return
        self.task, self.of = what.task, what.of
        if what.host in self.done:  # another task of this name
            self.done.clear()
        self.done[what.host] = self.hosts[what.host] = None

    def __str__(self) -> str:
        return "  ".join(part for part in (self._progress(), self.task) if part)

    def _progress(self) -> str:
        """``2/3 hosts, waiting for demo-train-2``; "" when hosts are not what it is about."""
        if not self.done:
            return ""
        if not self.of or len(self.done) >= self.of:
            return f"{len(self.done)} hosts" if len(self.done) > 1 else ", ".join(self.done)
        rest = [host for host in self.hosts if host not in self.done]
        if len(self.done) + len(rest) != self.of or len(rest) > _FEW:  # not all are known yet, or too many
            return f"{len(self.done)}/{self.of} hosts"
        return f"{len(self.done)}/{self.of} hosts, waiting for {', '.join(rest)}"


class Phases(PhaseLines):
    """Shows the phases of `up` and `down`: a picture that moves on a terminal, lines elsewhere."""

    def __init__(self, screen: Screen, *, verbose: bool) -> None:
        super().__init__(screen.note, verbose=verbose)
        self._screen = screen
        self._state = _Phase("")
        self._drawn: TaskID | None = None
        self._picture: Bar | None = None

    @contextmanager
    def shown(self, then: str = "") -> Iterator[None]:
        """Show phases until the end of the ``with``; ``then`` says what Ctrl-C leaves."""
        try:
            with self._screen.moving() as self._picture:
                yield
        except ENDINGS:
            if self.phase and then:
                self._screen.note(f"stopped half way: {then}")
            raise
        self._picture = None

    @property
    def now(self) -> str:
        return str(self._state)

    def step(self, phase: str) -> None:
        if phase == self.phase:
            return
        self._state = _Phase(phase)
        picture = self._picture
        if picture is None:
            super().step(phase)
            return
        self.phase = phase
        if self._drawn is not None:
            picture.stop_task(self._drawn)
            picture.update(self._drawn, completed=1, text="")
        self._drawn = picture.add_task(printable(shown_phase(phase)), total=1, text="")

    def progress(self, message: str | HostStep) -> None:
        self._state.take(message)
        super().progress(message)
        if self._picture and self._drawn is not None:
            self._picture.update(self._drawn, text=printable(self.now))
