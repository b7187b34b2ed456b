"""Processes that tests watch."""

from __future__ import annotations

import os
import time


def gone(pid: int) -> bool:
    """Whether a process ends, soon."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
