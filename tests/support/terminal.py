"""Run clusterctl on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.verbs import Clusterctl


def plain(shown: str) -> str:
    """What a terminal was sent, without colours and moves of its cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "")


class Terminal:
    """A program on a terminal of its own, and what has been shown there."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.shown = ""
        self._fd: int | None = fd

    def read_until(self, text: str, *, timeout_s: float = 60) -> None:
        """Read what is shown until ``text`` is; every new piece may take ``timeout_s``.

        Raises:
            AssertionError: it was not shown.
        """
        while text not in self.shown:
            assert self._fd is not None
            ready, _, _ = select.select([self._fd], [], [], timeout_s)
            assert ready, f"no {text!r}:\n{self.shown}"
            assert self._read(), f"ended before {text!r}:\n{self.shown}"

    def type(self, text: str) -> None:
        assert self._fd is not None
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """Read until the program has ended; its exit code, negative if a signal ended it."""
        while self._read():
            pass
        return self.process.wait(60)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read(self) -> bool:
        assert self._fd is not None
        try:
            data = os.read(self._fd, 4096)
        except OSError:  # Linux says so when the last program has closed the terminal
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(
    cli: Clusterctl, *argv: str | Path, size: tuple[int, int] = (24, 80), **environ: str
) -> Iterator[Terminal]:
    """Run a verb on a terminal of ``size`` rows and columns; an empty variable is unset."""
    env = {
        **os.environ,
        "TERM": "xterm-256color",
        "CLUSTERCTL_HOME": str(cli.home),
        **cli.environ,
        **environ,
    }
    with on_terminal([cli.script, *argv], env, cli.cwd, size) as window:
        yield window


@contextmanager
def on_terminal(
    argv: Sequence[str | Path], env: Mapping[str, str], cwd: Path, size: tuple[int, int] = (24, 80)
) -> Iterator[Terminal]:
    """Run any program so."""
    own_end, child_end = pty.openpty()
    termios.tcsetwinsize(child_end, size)
    given = {name: value for name, value in env.items() if value}
    words = ["setsid", "--ctty", *map(str, argv)]
    process = subprocess.Popen(
        words, cwd=cwd, env=given, stdin=child_end, stdout=child_end, stderr=child_end
    )
    os.close(child_end)
    window = Terminal(process, own_end)
    try:
        yield window
    finally:
        process.kill()
        process.wait()
        window.close()
