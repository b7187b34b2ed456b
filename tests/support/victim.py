"""A verb that is started to be ended before its time."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.support.faults import cause
from tests.support.processes import eventually
from tests.support.verbs import Clusterctl, Ran

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
