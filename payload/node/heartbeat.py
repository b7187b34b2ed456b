"""What a program tells the job that runs it. Standard library only.

hang.py takes a job for hung if neither its output, nor its metrics, nor the file
$CLUSTERCTL_HEARTBEAT changes for a while.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from payload.node.host import launcher_rank
from payload.node.requeue import JobEvents

PERIOD_S = 1.0
_due_s = 0.0


def beat() -> None:
    """Show that this program works, at most once a second. Call it between parts of work that may
    take long without output.

    The time of the file $CLUSTERCTL_HEARTBEAT changes, not its text, which is a number of steps.
    Only rank 0 does so: it is on the job's first node, where hang.py is.
    """
    global _due_s  # noqa: PLW0603
    now_s = time.monotonic()
    if now_s < _due_s:
        return
    _due_s = now_s + PERIOD_S
    path = os.environ.get("CLUSTERCTL_HEARTBEAT")
    if path and not launcher_rank(os.environ):
        with suppress(OSError):
            Path(path).touch()


def record_interruption(iteration: int, *, continues: bool) -> None:
    """Record in the job's events that a signal has stopped the training. continues: whether it can
    continue after ``iteration``.

    Only rank 0 does so: it is on the job's first node, and only that node writes there.
    """
    path = os.environ.get("CLUSTERCTL_HEARTBEAT")
    if path and not launcher_rank(os.environ):
        events = JobEvents(os.path.dirname(path))
        events.add("interrupted", iteration=iteration, continues=continues)
