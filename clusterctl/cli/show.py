"""What a person or a program sees: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from clusterctl.errors import ClusterctlError, UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress

READER_GONE = 128 + signal.SIGPIPE


class Screen:
    """One verb's output. With ``json`` stdout carries exactly one JSON object."""

    def __init__(self, *, json: bool, color: bool) -> None:
        self.json = json
        self._color = color
        self.known: dict[str, Any] = {}  # part of the answer, should the verb end in an error
        self._below: Console | None = None  # draws what notes must stay above
        self._live: Live | None = None

    def _console(self, *, stderr: bool) -> Console:
        from rich.console import Console

        return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, **self._plain())

    def _plain(self) -> dict[str, Any]:
        """What a Console needs to know to leave bold and dim away too, which it does not count as color."""
        return {} if self._color else {"color_system": None}

    def result(self, answer: dict[str, Any], text: str = "") -> None:
        """The verb's answer: the object for programs, the text for people."""
        if self.json:
            self.raw(_json({"ok": True, "failures": [], **answer}))
        elif text:
            self.raw((text.rstrip("\n") + "\n").encode(errors="replace"))

    def raw(self, data: bytes) -> None:
        """Bytes of a log, unchanged.

        Raises:
            ClusterctlError: they can't be written; where nobody reads them any more, the run ends.
        """
        with _writing(sys.stdout):
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
        console = Console(width=10_000, highlight=False, markup=False, **self._plain())
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def note(self, text: str) -> None:
        """A line of progress, or something worth knowing, on stderr."""
        if self._below is not None:
            self._below.print(text)
        else:
            with _writing(sys.stderr):
                print(text, file=sys.stderr, flush=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """A spinner beside a text while stderr is a terminal; nothing otherwise."""
        if not sys.stderr.isatty():
            yield
            return
        with self._console(stderr=True).status(text) as status, self._notes_go_above(status.console):
            yield

    @contextmanager
    def moving(self, picture: RenderableType) -> Iterator[bool]:
        """Draw a picture anew several times a second; yields whether stderr is a terminal that can.

        It is gone at the end, unless that is an error: then it shows how far things got.
        """
        if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in {"", "dumb", "unknown"}:
            yield False
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False, markup=False, **self._plain())
        with (
            Live(
                get_renderable=lambda: picture,
                console=console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live,
            self._notes_go_above(console),
        ):
            self._live = live
            try:
                yield True
            except BaseException:
                live.transient = False
                raise
            finally:
                self._live = None

    @contextmanager
    def still(self) -> Iterator[None]:
        """No picture moves meanwhile: the screen is for a question."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    @contextmanager
    def _notes_go_above(self, console: Console) -> Iterator[None]:
        self._below = console
        try:
            yield
        finally:
            self._below = None

    def bar(self) -> Progress:
        """A progress bar of bytes on stderr, which is gone when it is stopped."""
        from rich import progress

        return progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=self._console(stderr=True),
            transient=True,
        )

    def error(self, exc: ClusterctlError) -> None:
        """An expected error, in its one shape."""
        if self.json:
            failures = [dataclasses.asdict(failure) for failure in exc.failures]
            self.raw(_json({"ok": False, "failures": failures, **self.known}))
        console = self._console(stderr=True)
        try:
            console.print("error:", style="bold red", end=" ")
            console.print(str(exc))
        except OSError:  # nothing is left to say it on; the exit code still tells
            silence(sys.stderr)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something is destroyed; only on a terminal, else ``--yes`` is required.

        Raises:
            UsageError: no terminal and no ``--yes``, or the answer was no.
        """
        if yes:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(question, why="there is no terminal to ask on", fix="say --yes")
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise UsageError("nothing was done", why="the answer was no")


def _json(answer: dict[str, Any]) -> bytes:
    return (json.dumps(answer, default=str) + "\n").encode()


@contextmanager
def _writing(stream: TextIO) -> Iterator[None]:
    """Translate what goes wrong with our own output, and only that."""
    try:
        yield
    except BrokenPipeError:
        silence(stream)
        raise SystemExit(READER_GONE) from None
    except OSError as exc:
        silence(stream)
        raise ClusterctlError("the answer can't be written", why=exc.strerror or str(exc)) from exc


def silence(stream: TextIO) -> None:
    """Nobody takes what we write there: without this, Python would complain once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
