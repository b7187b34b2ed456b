"""How far a transfer is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clusterctl.cli.show import Screen
from clusterctl.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from clusterctl.transport.tree import Progress

_SILENT_S = 1.0  # what is done sooner is not worth a bar
_LINE_EVERY_S = 5.0


@contextmanager
def showing_progress(screen: Screen) -> Iterator[Progress]:
    """Something to tell the progress of a transfer to; nothing is shown with ``-o json``."""
    if screen.json:
        yield lambda *_: None
    elif sys.stderr.isatty():
        bar = _Bar(screen)
        try:
            yield bar
        finally:
            bar.stop()
    else:
        yield _Lines(screen)


class _Bar:
    """Bytes, rate and the time that is left; may be called from any thread."""

    def __init__(self, screen: Screen, silent_s: float = _SILENT_S) -> None:
        self._screen = screen
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            if self._bar is None:
                if time.monotonic() - self._begun < self._silent_s:
                    return
                self._bar = self._screen.bar()
                self._bar.start()
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(printable(what), total=total, completed=done)
            self._bar.update(self._tasks[what], completed=done, total=total)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines:
    """A line each few seconds."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._due = time.monotonic() + _LINE_EVERY_S
        self._what = ""
        self._begun = (0.0, 0)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._begun = what, (now, done)
        if now < self._due:
            return
        self._due = now + _LINE_EVERY_S
        from clusterctl.transport.tree import shown_size

        since, before = self._begun
        rate = (done - before) / max(now - since, 0.001)
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
        self._screen.note(f"{what}: {shown_size(done)} of {shown_size(total)}, {shown_size(rate)}/s{left}")
