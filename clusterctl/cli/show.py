"""What a person or a program sees: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from clusterctl.errors import ClusterctlError


class Screen:
    """One verb's output. With ``json`` stdout carries exactly one JSON object."""

    def __init__(self, *, json: bool, color: bool) -> None:
        self.json = json
        self._color = color
        self._status: Status | None = None

    def _console(self, *, stderr: bool) -> Console:
        from rich.console import Console

        return Console(stderr=stderr, no_color=not self._color, highlight=False, soft_wrap=True, markup=False)

    def result(self, answer: dict[str, Any], text: str = "") -> None:
        """The verb's answer: the object for programs, the text for people."""
        if self.json:
            sys.stdout.write(json.dumps({"ok": True, "failures": [], **answer}, default=str) + "\n")
        elif text:
            sys.stdout.write(text.rstrip("\n") + "\n")
        sys.stdout.flush()

    def raw(self, data: bytes) -> None:
        """Bytes of a log, unchanged."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
        """A plain table: columns aligned, no frames, numbers to the right."""
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for i, name in enumerate(head):
            numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
            table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row))
        console = Console(no_color=not self._color, width=10_000, highlight=False, markup=False)
        if not sys.stdout.isatty():
            console = Console(width=10_000, force_terminal=False, highlight=False, markup=False)
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def note(self, text: str) -> None:
        """A line of progress, or something worth knowing, on stderr."""
        if self._status is not None:
            self._status.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """A spinner with changing text while stderr is a terminal; nothing otherwise."""
        if not sys.stderr.isatty():
            yield
            return
        with self._console(stderr=True).status(text) as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    def update(self, text: str) -> None:
        """Change the spinner's text; dropped where there is no terminal."""
        if self._status is not None:
            self._status.update(text)

    def error(self, exc: ClusterctlError) -> None:
        """An expected error, in its one shape."""
        if self.json:
            failures = [dataclasses.asdict(failure) for failure in exc.failures]
            sys.stdout.write(json.dumps({"ok": False, "failures": failures}) + "\n")
            sys.stdout.flush()
        console = self._console(stderr=True)
        console.print("error:", style="bold red", end=" ")
        console.print(str(exc))

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something is destroyed; only on a terminal, else ``--yes`` is required.

        Raises:
            UsageError: no terminal and no ``--yes``, or the answer was no.
        """
        from clusterctl.errors import UsageError

        if yes:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(question, why="there is no terminal to ask on", fix="say --yes")
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise UsageError("nothing was done", why="the answer was no")
