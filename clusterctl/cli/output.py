"""What a person or a program sees: results on stdout, progress and errors on stderr.

Text goes through ``util/terminal.py`` here. A line that a verb gives is one line: a newline in a value,
perhaps of a job, becomes visible as other control characters do. Several lines are given as several.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from clusterctl.errors import ClusterctlError, UsageError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress as Bar

    from clusterctl.cli.pictures import TransferBar
    from clusterctl.jobs.watch import LogChunk
    from clusterctl.util.terminal import LogFilter


READER_GONE = 128 + signal.SIGPIPE
# A transfer that takes less is not worth a bar.
SILENT_S = 1.0


class Terminated(SystemExit):
    """SIGTERM or SIGHUP has come. The exit code is 128 + its number."""


ENDINGS = (KeyboardInterrupt, Terminated)  # by which a user ends what goes on


class Screen:
    """One verb's output. With ``json`` stdout carries exactly one JSON object."""

    def __init__(self, *, json: bool, color: bool) -> None:
        self.json = json
        self._color = color
        self.known: dict[str, Any] = {}  # part of the answer, should the verb end in an error
        self._below: Console | None = None  # draws what notes must stay above
        self._live: Live | None = None
        self._heads: set[str] = set()  # lines that head a table, which are bold
        self._logs: dict[tuple[str, int | None], LogFilter] = {}

    def _console(self, *, stderr: bool, wrap: bool = False) -> Console:
        from rich.console import Console

        return Console(
            stderr=stderr,
            color_system="auto" if self._color else None,  # NO_COLOR would leave bold and dim
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=not wrap,
        )

    def result(self, answer: dict[str, Any], *lines: str) -> None:
        """The verb's answer: the object for programs, the lines for people."""
        if self.json:
            self._write(_json({"ok": True, "failures": [], **answer}))
        elif lines:
            self._write(f"{self._shown(lines, stderr=False)}\n".encode(errors="replace"))

    def document(self, answer: dict[str, Any], text: str) -> None:
        """The same where the text is one of ours to keep, such as a script: unchanged but for a terminal."""
        if self.json:
            self.result(answer)
            return
        data = text.encode(errors="replace")
        if sys.stdout.isatty():
            shown = _log_filter()
            data = shown.feed(data) + shown.end()
        self._write(data.rstrip(b"\n") + b"\n")

    @contextmanager
    def logs(self, *, raw: bool = False) -> Iterator[Callable[[LogChunk], None]]:
        """Yields what shows the logs of jobs, each on the stream that the job wrote it to.

        ``raw`` leaves the bytes as they are, but for a terminal.
        """
        try:
            yield functools.partial(self._log, raw=raw)
        finally:
            for (name, _), log in self._logs.items():
                self._write(log.end(), name)

    def _log(self, chunk: LogChunk, *, raw: bool) -> None:
        data, log = chunk.data, (chunk.stream, chunk.task)
        if not raw or getattr(sys, chunk.stream).isatty():
            if log not in self._logs:
                self._logs[log] = _log_filter()
            data = self._logs[log].feed(data)
        self._write(data, chunk.stream)

    def _own_line(self) -> None:
        """End the line that a log has begun, and its color: it could hide or overwrite what follows there."""
        for name in ("stdout", "stderr"):
            if name == "stdout" and not (sys.stdout.isatty() and sys.stderr.isatty()):
                continue  # it is not where notes and errors go
            ends = {log.end_line() for (of, _), log in self._logs.items() if of == name}
            if end := max(ends, key=len, default=b""):
                self._write(end, name)

    def _write(self, data: bytes, name: str = "stdout") -> None:
        """Write bytes to stdout or stderr; where nobody reads them any more, the run ends."""
        stream: TextIO = getattr(sys, name)
        with _writing(stream):
            stream.buffer.write(data)
            stream.buffer.flush()

    def _shown(self, lines: Sequence[str], *, stderr: bool) -> str:
        """The lines, fit for a terminal; heads of tables are bold on one."""
        shown = [printable(line) for line in lines]
        if self._heads.intersection(shown) and self._console(stderr=stderr).color_system:
            shown = [f"\x1b[1m{line}\x1b[0m" if line in self._heads else line for line in shown]
        return "\n".join(shown)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
        """The lines of a plain table: columns aligned, no frames, numbers to the right."""
        from rich.cells import cell_len, set_cell_size

        numeric = [
            bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))
        ]
        cells = [
            [printable(f"{c:.1f}" if isinstance(c, float) else str(c)) for c in row] for row in (head, *rows)
        ]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                " " * (width - cell_len(cell)) + cell if right else set_cell_size(cell, width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            ).rstrip()
            for row in cells
        ]
        self._heads.add(lines[0])
        return lines

    def note(self, *lines: str) -> None:
        """Lines of progress, or something worth knowing, on stderr."""
        self._own_line()
        text = self._shown(lines, stderr=True)
        if self._below is not None:
            from clusterctl.cli.pictures import styled

            self._below.print(styled(text))
        else:
            with _writing(sys.stderr):
                print(text, file=sys.stderr, flush=True)

    @contextmanager
    def redrawing(self) -> Iterator[Callable[[Sequence[str]], None]]:
        """Yields what shows lines on the terminal in place of those before."""
        from clusterctl.cli import pictures

        with pictures.redrawn_lines(self._console(stderr=False, wrap=True)) as live:
            yield lambda lines: live.update(pictures.styled(self._shown(lines, stderr=False)), refresh=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """A spinner beside a text while stderr is a terminal; nothing otherwise."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.text import Text

        shown = Text(printable(text))
        with self._console(stderr=True).status(shown) as status, self._notes_go_above(status.console):
            yield

    @contextmanager
    def moving(self) -> Iterator[Bar | None]:
        """Tasks with a spinner and their seconds, where stderr is a terminal that can draw lines anew.

        They are gone at the end, unless that is an error: then they show how far things got.
        """
        if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in {"", "dumb", "unknown"}:
            yield None
            return
        from clusterctl.cli.pictures import running_tasks

        console = self._console(stderr=True, wrap=True)
        bar = running_tasks(console)
        with bar, self._notes_go_above(console):
            self._live = bar.live
            try:
                yield bar
            except BaseException:
                bar.live.transient = False
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

    def transfer_bar(self) -> TransferBar:
        """Return a bar on stderr that shows the progress of transfers until it is stopped."""
        # rich takes longer to read than all else of most verbs.
        from clusterctl.cli.pictures import TransferBar

        return TransferBar(self._console(stderr=True), SILENT_S)

    def error(self, exc: ClusterctlError) -> None:
        """An expected error, in its one shape."""
        if self.json:
            failures = [dataclasses.asdict(failure) for failure in exc.failures]
            self._write(_json({"ok": False, "failures": failures, **self.known, **exc.answer}))
        console = self._console(stderr=True)
        try:
            self._own_line()
            console.print("error:", style="bold red", end=" ")
            console.print("\n".join(map(printable, str(exc).split("\n"))))
        except OSError:  # nothing is left to say it on; the exit code still tells
            silence(sys.stderr)

    @property
    def can_prompt(self) -> bool:
        """Whether a person can read a question on stderr and answer it."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def confirm(self, prompt: str, *, yes: bool) -> None:
        """Ask before something is destroyed; only on a terminal, else ``--yes`` is required.

        Raises:
            UsageError: no terminal and no ``--yes``, or the answer was no.
        """
        if yes:
            return
        if not self.can_prompt:
            why = "there is no terminal to prompt on"
            raise UsageError(prompt, code="needs-confirmation", why=why, fix="say --yes")
        print(f"{printable(prompt)} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise UsageError("nothing was done", code="declined", why="the answer was no")


def _log_filter() -> LogFilter:
    """Return a filter of logs, which only verbs that show logs need."""
    from clusterctl.util.terminal import LogFilter

    return LogFilter()


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
        raise ClusterctlError(
            "the answer can't be written", code="answer-unwritable", why=exc.strerror or str(exc)
        ) from exc


def silence(stream: TextIO) -> None:
    """Nobody takes what we write there: without this, Python would complain once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
