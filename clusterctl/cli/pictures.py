"""Animated displays on a terminal, drawn by rich: tasks with a spinner, bars of transfers."""

from __future__ import annotations

import threading
import time

from rich import progress
from rich.console import Console
from rich.live import Live as Live  # noqa: PLC0414 - for Screen
from rich.table import Column
from rich.text import Text as Text  # noqa: PLC0414

from clusterctl.errors import printable


def console(*, stderr: bool, color: bool, wrap: bool = False) -> Console:
    return Console(
        stderr=stderr,
        # With NO_COLOR alone, rich would still print bold and dim text.
        color_system="auto" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not wrap,
    )


def running_tasks(console: Console) -> progress.Progress:
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
    """Progress bars of transfers: bytes, rate and remaining time. Safe to call from any thread."""

    def __init__(self, console: Console, silent_s: float) -> None:
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._begun: dict[str, float] = {}
        self._tasks: dict[str, progress.TaskID] = {}
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def __call__(self, name: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._begun.setdefault(name, now) < self._silent_s:
                return
            if name not in self._tasks:
                self._bar.start()
                self._tasks[name] = self._bar.add_task(printable(name), total=total, completed=done)
            self._bar.update(self._tasks[name], completed=done, total=total)

    def stop(self) -> None:
        if self._tasks:
            self._bar.stop()
