"""Time that passes only as a test says. Calls that run beside each other may take it beside each
other.

    time = PlayedTime()
    limit = Limit.within(25, time.clock)
    time.passes(10.0)   # in this thread, since it last looked at the clock
    assert time.latest <= 25

A thread that looks at the clock sees how late it is where most time has passed: never less than in
truth.
"""

from __future__ import annotations

import threading

from clusterctl.util.progress import Clock


class PlayedTime:
    """``latest``: how late it is."""

    def __init__(self) -> None:
        self.latest = 0.0
        self.clock = Clock(now=self._now, sleep=self.passes)
        self._lock = threading.Lock()
        self._seen = threading.local()

    def _now(self) -> float:
        with self._lock:
            self._seen.at = self.latest
            return self.latest

    def passes(self, seconds: float) -> None:
        """This thread spends some time, from when it last looked at the clock."""
        with self._lock:
            self.latest = max(self.latest, getattr(self._seen, "at", self.latest) + seconds)
