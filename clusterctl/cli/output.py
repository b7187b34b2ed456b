"""The output of commands: results on stdout, progress and errors on stderr.

Control characters are escaped, also newlines. Therefore commands pass each line as a separate
string.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from clusterctl.cli.advice import cluster_option, with_cluster
from clusterctl.errors import ClusterctlError, Failure, Quoted, UsageError, printable
from clusterctl.transport.sudo import asked_of_program

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.status import Status

    from clusterctl.jobs.watch import LogChunk
    from clusterctl.state.chosen import ChosenCluster
    from clusterctl.transport.tree import Progress
    from clusterctl.util.terminal import LogFilter


READER_GONE = 128 + signal.SIGPIPE
# A transfer that takes less than this shows no progress bar.
_NO_BAR_S = 1.0


_SIGNALLED = 128


class Terminated(SystemExit):
    """SIGTERM or SIGHUP was received. The exit code is 128 + the signal's number."""

    @classmethod
    def by(cls, number: int) -> Terminated:
        return cls(_SIGNALLED + number)

    @property
    def exit_code(self) -> int:
        return int(self.code or 0)

    @property
    def number(self) -> int:
        """The number of the signal."""
        return self.exit_code - _SIGNALLED


# The exceptions that Ctrl-C and signals raise.
ENDINGS = (KeyboardInterrupt, Terminated)


@dataclass
class Screen:
    """The output of a command, and the options that all commands share.

    json: whether to print the result as a single JSON object.
    form: the value of --output; "" if it is not given.
    file, cluster: the spec file or the cluster name from the options.
    partial_answer: fields of the JSON answer that are known so far. A failed command prints these
        fields.
    """

    json: bool
    color: bool
    form: str = ""
    verbose: bool = False
    file: Path | None = None
    cluster: str | None = None
    partial_answer: dict[str, Any] = field(default_factory=dict)
    # The console of a spinner or a progress bar. Notes are printed above it.
    _below: Console | None = None
    # The animated display, which stops during prompts.
    live: Live | Status | None = None
    # The header lines of tables, which are printed in bold.
    _heads: set[str] = field(default_factory=set)
    _logs: dict[tuple[str, int | None], LogFilter] = field(default_factory=dict)
    # Whether the JSON object is printed. A command prints a single object, whatever happens later.
    _has_answered: bool = False

    def chosen(self) -> ChosenCluster:
        """Return the cluster that -f and --cluster select. Print notes about the choice."""
        # A slow import, which --help does not need.
        from clusterctl.state.chosen import ChosenCluster

        return ChosenCluster(self.file, self.cluster, self.note)

    def result(self, answer: dict[str, Any], *lines: str) -> None:
        """Print the result of a command: ``answer`` if JSON was asked for, otherwise ``lines``."""
        if self.json:
            self._has_answered = True
            self._write(_json({"ok": True, "failures": [], **answer}))
        elif lines:
            self._write(f"{self._shown(lines, stderr=False)}\n".encode(errors="replace"))

    def ended(self, failure: Failure) -> None:
        """Print the JSON answer of a command that Ctrl-C or a signal has ended."""
        if self.json:
            self._answer_failure({"failures": [asdict(failure)], **self.partial_answer})

    def _answer_failure(self, answer: dict[str, Any]) -> None:
        if not self._has_answered:
            self._has_answered = True
            self._write(_json({"ok": False, **answer}))

    def document(self, answer: dict[str, Any], text: str) -> None:
        """Print a text such as a script as the result, or ``answer`` if JSON was asked for."""
        if self.json:
            self.result(answer)
            return
        if sys.stdout.isatty():
            text = "".join(
                part if part in "\t\n" else printable(part) for part in re.split("([\t\n])", text)
            )
        self._write(text.encode(errors="replace").rstrip(b"\n") + b"\n")

    @contextmanager
    def logs(self, *, raw: bool = False) -> Iterator[Callable[[LogChunk], None]]:
        """Yield a function that prints chunks of jobs' stdout and stderr.

        raw: print the bytes unchanged, except on a terminal.
        """
        try:
            yield functools.partial(self._log, raw=raw)
        finally:
            for (name, _), log in self._logs.items():
                self._write(log.end(), name)

    def _log(self, chunk: LogChunk, *, raw: bool) -> None:
        data = chunk.data
        log = (chunk.stream, chunk.task)
        if not raw or getattr(sys, chunk.stream).isatty():
            if log not in self._logs:
                self._logs[log] = _log_filter()
            data = self._logs[log].feed(data)
        self._write(data, chunk.stream)

    def _own_line(self) -> None:
        """End unfinished lines of logs, and reset their colors, before other output is printed."""
        for name in ("stdout", "stderr"):
            # Notes and errors go to stderr, which shares lines with stdout only on a terminal.
            if name == "stdout" and not (sys.stdout.isatty() and sys.stderr.isatty()):
                continue
            ends = {log.end_line() for (stream, _), log in self._logs.items() if stream == name}
            if end := max(ends, key=len, default=b""):
                self._write(end, name)

    def _write(self, data: bytes, name: str = "stdout") -> None:
        stream: TextIO = getattr(sys, name)
        with writing(stream):
            stream.buffer.write(data)
            stream.buffer.flush()

    def _shown(self, lines: Sequence[str], *, stderr: bool) -> str:
        """Join lines to a text. Escape control characters. Make table heads bold on a terminal."""
        shown = [printable(self._advice(line)) for line in lines]
        if self._heads.intersection(shown) and self._is_colored(
            sys.stderr if stderr else sys.stdout
        ):
            shown = [f"\x1b[1m{line}\x1b[0m" if line in self._heads else line for line in shown]
        return "\n".join(shown)

    def _advice(self, text: str) -> str:
        """Return a text whose commands name the cluster that the user has chosen."""
        if isinstance(text, Quoted) or "`clusterctl " not in text:
            return text
        option = cluster_option(self.file, self.cluster)
        return with_cluster(text, option, self._cluster_name() if option else "")

    def _cluster_name(self) -> str:
        """Return the name of the cluster that the user has chosen; "" if it can't be read."""
        with suppress(ClusterctlError):
            return self.chosen().named_cluster() or ""
        return ""

    def _is_colored(self, stream: TextIO) -> bool:
        return self.color and stream.isatty() and can_draw()

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
        """Return the lines of a table without frames. Columns of numbers are right-aligned.

        The cells are names, reasons and numbers, mostly of other programs.
        """
        from rich.cells import cell_len, set_cell_size

        numeric = [
            bool(rows) and all(isinstance(row[i], int | float) for row in rows)
            for i in range(len(head))
        ]
        cells = [
            [printable(f"{c:.1f}" if isinstance(c, float) else str(c)) for c in row]
            for row in (head, *rows)
        ]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        lines: list[str] = [
            Quoted(
                "  ".join(
                    " " * (width - cell_len(cell)) + cell if right else set_cell_size(cell, width)
                    for cell, width, right in zip(row, widths, numeric, strict=True)
                ).rstrip()
            )
            for row in cells
        ]
        self._heads.add(lines[0])
        return lines

    def note(self, *lines: str) -> None:
        """Print notes, or lines about progress, on stderr."""
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
        """Yield a function that fills the screen with lines. What was there before is shown again when
        the ``with`` block ends.
        """
        pictures = _pictures()
        console = pictures.console(stderr=False, color=self.color, wrap=True)
        with pictures.Live(
            console=console, auto_refresh=False, vertical_overflow="crop", screen=True
        ) as live:
            yield lambda lines: live.update(
                pictures.Text.from_ansi(self._shown(lines, stderr=False)), refresh=True
            )

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show a spinner with this text if stderr is a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        pictures = _pictures()
        console = pictures.console(stderr=True, color=self.color)
        status = console.status(pictures.Text(printable(text)))
        with status, self.notes_go_above(console):
            self.live = status
            try:
                yield
            finally:
                self.live = None

    @contextmanager
    def still(self) -> Iterator[None]:
        """Stop the animated display during the ``with`` block, which can prompt the user."""
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
        """Yield a function that draws a progress bar of transfers, if there is a terminal."""
        if self.json or not sys.stderr.isatty():
            yield lambda *_: None
            return
        pictures = _pictures()
        bar = pictures.TransferBar(pictures.console(stderr=True, color=self.color), _NO_BAR_S)
        try:
            yield bar
        finally:
            bar.stop()

    def error(self, exc: ClusterctlError) -> None:
        if self.json:
            failures = [
                asdict(replace(failure, fix=self._advice(failure.fix))) for failure in exc.failures
            ]
            self._answer_failure({"failures": failures, **self.partial_answer, **exc.answer})
        # Only the fix advises; the cause is in the words of the failed tool.
        exc.fix = self._advice(exc.fix)
        title = "\x1b[1;31merror:\x1b[0m" if self._is_colored(sys.stderr) else "error:"
        try:
            self._own_line()
            print(title, exc, file=sys.stderr, flush=True)
        except OSError:
            # stderr is closed. Only the exit code reports the error.
            silence(sys.stderr)

    @property
    def can_prompt(self) -> bool:
        return sys.stdin.isatty() and sys.stderr.isatty()

    def sudo_password(self) -> str | None:
        """Ask for the sudo password: on the terminal, or the program SUDO_ASKPASS. None: no answer."""
        if not self.can_prompt:
            return asked_of_program()
        with self.still(), suppress(EOFError):
            return getpass.getpass("sudo password: ") or None
        return None

    def confirm(self, prompt: str, *, yes: bool) -> None:
        """Ask for confirmation on a terminal. Without a terminal, ``--yes`` is required.

        Raises:
            UsageError: there is neither a terminal nor ``--yes``, or the answer was no.
        """
        if yes:
            return
        if not self.can_prompt:
            reason = "there is no terminal to prompt on"
            raise UsageError(
                f"the command needs a confirmation: {prompt}",
                code="confirmation-needed",
                why=reason,
                fix="to confirm, pass --yes",
            )
        print(f"{printable(prompt)} [y/N] ", end="", file=sys.stderr, flush=True)
        if _typed_line().strip().lower() not in {"y", "yes"}:
            raise UsageError("nothing was done", code="declined", why="you did not answer yes")


def _typed_line() -> str:
    """Read a line from the terminal.

    Python would see a signal that arrives just before a blocking read only after it, so the read
    waits until there is a line. A signal ends the wait whenever it arrives, because it makes the
    wakeup pipe readable.
    """
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    previous = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        while sys.stdin not in select.select([sys.stdin, woken], [], [])[0]:
            os.read(woken, select.PIPE_BUF)
        return sys.stdin.readline()
    finally:
        signal.set_wakeup_fd(previous)
        os.close(woken)
        os.close(wakes)


def can_draw() -> bool:
    """Return whether the terminal supports colors and redrawing."""
    return os.environ.get("TERM", "dumb") not in {"", "dumb", "unknown"}


def _pictures() -> ModuleType:
    # The module imports rich, which takes long, and JSON needs no pictures.
    from clusterctl.cli import pictures

    return pictures


def _log_filter() -> LogFilter:
    from clusterctl.util.terminal import LogFilter

    return LogFilter()


def _json(answer: dict[str, Any]) -> bytes:
    """Return the answer as a line of JSON, which has neither NaN nor infinite numbers: null."""
    try:
        text = json.dumps(answer, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(
            json.loads(json.dumps(answer, default=str), parse_constant=lambda _: None)
        )
    return f"{text}\n".encode()


@contextmanager
def writing(stream: TextIO) -> Iterator[None]:
    """Turn OSErrors of ``stream`` into ClusterctlErrors. Exit quietly if a pipe's reader ended."""
    try:
        yield
    except BrokenPipeError:
        silence(stream)
        raise SystemExit(READER_GONE) from None
    except OSError as exc:
        silence(stream)
        reason = exc.strerror or str(exc)
        raise ClusterctlError(
            "the output can't be written",
            code="file-unwritable",
            about="output",
            why=reason,
            fix="write the output to another place, or free space there",
        ) from exc


def silence(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null, so that Python does not report its error on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
