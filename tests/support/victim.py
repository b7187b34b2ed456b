"""A verb that is started to be ended before its time."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults import cause
from tests.support.verbs import Clusterctl

_ENDS_S = 60.0
_SIGNALS = {"int": signal.SIGINT, "hup": signal.SIGHUP, "term": signal.SIGTERM}


@dataclass(frozen=True)
class Ended:
    """How it came to its end."""

    code: int
    stdout: str
    stderr: str


class Victim:
    """One run of a verb, in a process session of its own as on a terminal."""

    def __init__(self, clusterctl: Clusterctl, *argv: str | Path) -> None:
        self._home = clusterctl.home
        self._process = clusterctl.start(*argv)
        self._start = time.monotonic()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said: list[str] = []
        self._out: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._stderr, self._stdout)]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_phase(self, phase: str) -> None:
        """Wait until it says that it begins a phase.

        Raises:
            AssertionError: it ended first.
        """
        while (line := self._lines.get(timeout=300)) is not None:
            if line.rstrip().endswith(f"s] {phase.replace('_', ' ')}"):
                return
        raise AssertionError(f"it never began {phase!r}:\n{''.join(self._said)}")

    def until(self, seconds: float) -> None:
        """Wait until that long after its start, or until it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._start + seconds - time.monotonic()))

    def hit(self, how: str, cluster_id: str = "") -> Ended:
        """End it: `kill` (it alone), `kill-all` (and all that it started), `int`, `hup`, `term` or
        `reboot`."""
        if how == "kill":
            self._signal(signal.SIGKILL, alone=True)
        elif how == "kill-all":
            cause("kill-all", self._home)
        elif how == "reboot":
            cause("reboot", self._home, cluster_id)
        else:
            self._signal(_SIGNALS[how], alone=False)
        return self.end()

    def end(self, *, patience_s: float = _ENDS_S) -> Ended:
        """Await its end; one that does not come is a failure."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL, alone=False)
            raise AssertionError(f"no end within {patience_s} s:\n{''.join(self._said)}") from None
        for reader in self._readers:
            reader.join(_ENDS_S)
        return Ended(code, "".join(self._out), "".join(self._said))

    def _signal(self, sign: signal.Signals, *, alone: bool) -> None:
        with suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self._process.pid, sign)

    def _stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _stdout(self) -> None:
        assert self._process.stdout is not None
        self._out.extend(self._process.stdout)
