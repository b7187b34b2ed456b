"""What a person or a program sees: results on stdout, progress and errors on stderr.

Text goes through ``util/terminal.py`` here. A line that a verb gives is one line: a newline in a value,
perhaps of a job, becomes visible as other control characters do. Several lines are given as several.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from clusterctl.errors import ClusterctlError, UsageError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from clusterctl.jobs.watch import LogChunk
    from clusterctl.state.chosen import ChosenCluster
    from clusterctl.transport.tree import Progress
    from clusterctl.util.terminal import LogFilter


READER_GONE = 128 + signal.SIGPIPE
# A transfer that takes less is not worth a bar.
_SILENT_S = 1.0


class Terminated(SystemExit):
    """SIGTERM or SIGHUP has come. The exit code is 128 + its number."""


ENDINGS = (KeyboardInterrupt, Terminated)  # by which a user ends what goes on


@dataclass
class Screen:
    """The output of one verb, and the options that all verbs have.

    json: whether stdout carries exactly one JSON object.
    markdown: whether `report` prints Markdown.
    verbose: whether more is told, and tracebacks of unexpected errors.
    file, cluster: the spec file or the name of a cluster that were given; see ``chosen``.
    """

    json: bool
    color: bool
    markdown: bool = False
    verbose: bool = False
    file: Path | None = None
    cluster: str | None = None
    # A part of the answer, which is also shown if the verb ends in an error.
    known: dict[str, Any] = field(default_factory=dict)
    # Draws what notes must stay above.
    _below: Console | None = None
    # Moves until a question is asked.
    live: Live | None = None
    # Lines that head a table. They are bold.
    _heads: set[str] = field(default_factory=set)
    _logs: dict[tuple[str, int | None], LogFilter] = field(default_factory=dict)

    def chosen(self) -> ChosenCluster:
        """Return the cluster that is meant. Its notes go to the screen."""
        # The help does not need it.
        from clusterctl.state.chosen import ChosenCluster

        return ChosenCluster(self.file, self.cluster, self.note)

    def result(self, answer: dict[str, Any], *lines: str) -> None:
        """The verb's answer: the object for programs, the lines for people."""
        if self.json:
            self._write(_json({"ok": True, "failures": [], **answer}))
        elif lines:
            self._write(f"{self._shown(lines, stderr=False)}\n".encode(errors="replace"))

    def document(self, answer: dict[str, Any], text: str) -> None:
        """The same of a text that is ours, such as a script: unchanged but for a terminal."""
        if self.json:
            self.result(answer)
            return
        if sys.stdout.isatty():
            text = "".join(part if part in "\t\n" else printable(part) for part in re.split("([\t\n])", text))
        self._write(text.encode(errors="replace").rstrip(b"\n") + b"\n")

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
        stream: TextIO = getattr(sys, name)
        with writing(stream):
            stream.buffer.write(data)
            stream.buffer.flush()

    def _shown(self, lines: Sequence[str], *, stderr: bool) -> str:
        """The lines, fit for a terminal; heads of tables are bold on one."""
        shown = [printable(line) for line in lines]
        if self._heads.intersection(shown) and self._is_colored(sys.stderr if stderr else sys.stdout):
            shown = [f"\x1b[1m{line}\x1b[0m" if line in self._heads else line for line in shown]
        return "\n".join(shown)

    def _is_colored(self, stream: TextIO) -> bool:
        return self.color and stream.isatty() and can_draw()

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
        if not lines:
            return
        self._own_line()
        text = self._shown(lines, stderr=True)
        if self._below is not None:
            self._below.print(_pictures().Text.from_ansi(text))
        else:
            with writing(sys.stderr):
                print(text, file=sys.stderr, flush=True)

    @contextmanager
    def redrawing(self) -> Iterator[Callable[[Sequence[str]], None]]:
        """Yields what shows lines on the terminal in place of those before."""
        pictures = _pictures()
        console = pictures.console(stderr=False, color=self.color, wrap=True)
        with pictures.Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda lines: live.update(
                pictures.Text.from_ansi(self._shown(lines, stderr=False)), refresh=True
            )

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """A spinner beside a text while stderr is a terminal; nothing otherwise."""
        if not sys.stderr.isatty():
            yield
            return
        pictures = _pictures()
        console = pictures.console(stderr=True, color=self.color)
        with console.status(pictures.Text(printable(text))), self.notes_go_above(console):
            yield

    @contextmanager
    def still(self) -> Iterator[None]:
        """No picture moves meanwhile: the screen is for a question."""
        if self.live is None:
            yield
            return
        self.live.stop()
        try:
            yield
        finally:
            self.live.start()

    @contextmanager
    def notes_go_above(self, console: Console) -> Iterator[None]:
        self._below = console
        try:
            yield
        finally:
            self._below = None

    @contextmanager
    def transfers(self) -> Iterator[Progress]:
        """Yields what shows the progress of transfers: a bar where stderr is a terminal, else nothing."""
        if self.json or not sys.stderr.isatty():
            yield lambda *_: None
            return
        pictures = _pictures()
        bar = pictures.TransferBar(pictures.console(stderr=True, color=self.color), _SILENT_S)
        try:
            yield bar
        finally:
            bar.stop()

    def error(self, exc: ClusterctlError) -> None:
        if self.json:
            failures = [asdict(failure) for failure in exc.failures]
            self._write(_json({"ok": False, "failures": failures, **self.known, **exc.answer}))
        title = "\x1b[1;31merror:\x1b[0m" if self._is_colored(sys.stderr) else "error:"
        try:
            self._own_line()
            print(title, "\n".join(map(printable, str(exc).split("\n"))), file=sys.stderr, flush=True)
        except OSError:  # nothing is left to say it on; the exit code still tells
            silence(sys.stderr)

    @property
    def can_prompt(self) -> bool:
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


def can_draw() -> bool:
    """Return whether the terminal understands colors and can draw lines anew."""
    return os.environ.get("TERM", "dumb") not in {"", "dumb", "unknown"}


def _pictures() -> ModuleType:
    """Return the module of what moves, which reads rich: that takes longer than all else of most verbs."""
    from clusterctl.cli import pictures

    return pictures


def _log_filter() -> LogFilter:
    """Return a filter of logs, which only verbs that show logs need."""
    from clusterctl.util.terminal import LogFilter

    return LogFilter()


def _json(answer: dict[str, Any]) -> bytes:
    return (json.dumps(answer, default=str) + "\n").encode()


@contextmanager
def writing(stream: TextIO) -> Iterator[None]:
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
