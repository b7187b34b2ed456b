"""What moves on a terminal: spinners, bars, and lines that are drawn again. Built of rich."""

from __future__ import annotations

import threading
import time

from rich import progress
from rich.console import Console
from rich.live import Live
from rich.table import Column
from rich.text import Text

from clusterctl.errors import printable


def styled(text: str) -> Text:
    """Return a text with the colors that its escape sequences name."""
    return Text.from_ansi(text)


def redrawn_lines(console: Console) -> Live:
    """Return lines that are drawn in place of those before."""
    return Live(console=console, auto_refresh=False, vertical_overflow="crop")


def running_tasks(console: Console) -> progress.Progress:
    """Return tasks with a spinner, their seconds, and a text."""
    return progress.Progress(
        progress.SpinnerColumn("line", style="none", finished_text=" "),
        progress.TextColumn("{task.description:<19} {task.elapsed:6.1f} s ", markup=False),
        progress.TextColumn(
            "{task.fields[text]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        console=console,
        refresh_per_second=8,
        transient=True,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class TransferBar:
    """Shows bytes, their rate and the time that is left. May be called from any thread."""

    def __init__(self, console: Console, silent_s: float) -> None:
        self._console = console
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._begun: dict[str, float] = {}
        self._bar: progress.Progress | None = None
        self._tasks: dict[str, progress.TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._begun.setdefault(what, now) < self._silent_s:
                return
            if self._bar is None:
                self._bar = _bytes_bar(self._console)
                self._bar.start()
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(printable(what), total=total, completed=done)
            self._bar.update(self._tasks[what], completed=done, total=total)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bytes_bar(console: Console) -> progress.Progress:
    """Return a bar that is gone when it is stopped."""
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )
