"""Runs clusterctl as a user does: the installed console script, in a process of its own.

A ``Victim`` is a verb that is started to be ended before its time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.faults import cause
from tests.support.processes import eventually
from tests.support.residue import temporary

_TRACEBACK = "Traceback (most recent call last)"
SCRIPT = Path(sys.executable).with_name("clusterctl")


@dataclass(frozen=True)
class Ran:
    """How one call ended."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What was printed under `-o json`."""
        return json.loads(self.stdout)

    def __str__(self) -> str:
        """All there is to know when an assertion about it fails."""
        ended = f"$ {' '.join(self.argv)}\nexit code {self.rc}"
        return f"{ended}\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


@dataclass(frozen=True)
class Clusterctl:
    """`clusterctl("up", "-f", spec)`. Every call has a time limit, and none may show a traceback."""

    home: Path
    cwd: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    script: Path = SCRIPT
    forked: bool = False
    """Without the start of a program, as forks.py says."""

    def __call__(
        self,
        *argv: str | Path,
        rc: int | None = 0,
        timeout_s: float = 600,
        cwd: Path | None = None,
        stdin: str = "",
    ) -> Ran:
        """Run a verb and expect an exit code; `rc=None` takes any.

        Raises:
            AssertionError: another exit code, a traceback, or no end within `timeout_s`.
        """
        words = (str(self.script), *map(str, argv))
        ran = self._run(words, cwd or self.cwd, stdin, timeout_s)
        assert _TRACEBACK not in ran.stdout + ran.stderr, f"a traceback\n{ran}"
        assert rc is None or ran.rc == rc, f"no exit {rc}\n{ran}"
        return ran

    def start(self, *argv: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start a verb in a process session of its own, for the test to signal or await."""
        return self._start((str(self.script), *map(str, argv)), cwd or self.cwd)

    def _environ(self) -> dict[str, str]:
        folder = temporary(self.home)
        folder.mkdir(exist_ok=True)
        ours = {"CLUSTERCTL_HOME": str(self.home), "TMPDIR": str(folder), "COLUMNS": "200"}
        return {**os.environ, **ours, **self.environ}

    def _start(self, words: tuple[str, ...], cwd: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=self._environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _run(self, words: tuple[str, ...], cwd: Path, stdin: str, timeout_s: float) -> Ran:
        if self.forked and self.script == SCRIPT:
            environ = self._environ()
            done = forks.clusterctl(words, cwd=cwd, environ=environ, stdin=stdin, timeout_s=timeout_s)
            ran = Ran(words, done.returncode, done.stdout, done.stderr)
            assert ran.rc != forks.TIMED_OUT, f"no end, {timeout_s}s\n{ran}"
            return ran
        process = self._start(words, cwd)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            stdout, stderr = _end(process)
            ran = Ran(words, process.returncode, stdout, stderr)
            raise AssertionError(f"no end within {timeout_s} s\n{ran}") from None
        except BaseException:
            _end(process)
            raise
        return Ran(words, process.returncode, stdout, stderr)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the whole process group, kindly at first; what it had printed."""
    for sign, patience_s in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
        os.killpg(process.pid, sign)
        try:
            return process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            continue
    return "", "(it would not end)"


_ENDS_S = 60.0
_SIGNALS = {"int": signal.SIGINT, "hup": signal.SIGHUP, "term": signal.SIGTERM}


class Victim:
    """One run of a verb, in a process session of its own as on a terminal."""

    def __init__(self, clusterctl: Clusterctl, *argv: str | Path) -> None:
        self._argv, self._home = tuple(map(str, argv)), clusterctl.home
        self._process = clusterctl.start(*argv)
        self._start = time.monotonic()
        self._out: list[str] = []
        self._said: list[str] = []
        self._readers = [_reader(self._process.stdout, self._out), _reader(self._process.stderr, self._said)]

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_phase(self, phase: str) -> None:
        """Wait until it says that it begins a phase.

        Raises:
            AssertionError: it ended first.
        """
        words = f"s] {phase.replace('_', ' ')}\n"

        def begun() -> bool:
            return any(line.endswith(words) for line in list(self._said))

        eventually(lambda: begun() or not self._readers[1].is_alive(), 300)
        assert begun(), f"it never began {phase!r}:\n{''.join(self._said)}"

    def until(self, seconds: float) -> None:
        """Wait until that long after its start, or until it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._start + seconds - time.monotonic()))

    def hit(self, how: str, cluster_id: str = "") -> Ran:
        """End it: `kill` (it alone), `kill-all` (and all that it started), `int`, `hup`, `term` or
        `reboot`."""
        if how == "kill":
            self._signal(signal.SIGKILL, alone=True)
        elif how in {"kill-all", "reboot"}:
            cause(how, self._home, *([cluster_id] if how == "reboot" else []))
        else:
            self._signal(_SIGNALS[how], alone=False)
        return self.end()

    def end(self, *, patience_s: float = _ENDS_S) -> Ran:
        """Await its end; one that does not come is a failure."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL, alone=False)
            raise AssertionError(f"no end within {patience_s} s:\n{''.join(self._said)}") from None
        for reader in self._readers:
            reader.join(_ENDS_S)
        return Ran(self._argv, code, "".join(self._out), "".join(self._said))

    def _signal(self, sign: signal.Signals, *, alone: bool) -> None:
        with suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self._process.pid, sign)


def _reader(pipe: Iterable[str] | None, lines: list[str]) -> threading.Thread:
    """A thread that adds what comes to the lines."""

    def read() -> None:
        for line in pipe or ():
            lines.append(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread
