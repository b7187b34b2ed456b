"""A count of the commands that ran on an attached cluster, in the file `calls` of its workspace.

The file has a line with the time of each command.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from clusterctl.errors import ClusterctlError
from clusterctl.state.workspace import write_atomic

HOUR_S: Final = 3600
# The size at which lines older than an hour are removed.
_MOST_BYTES: Final = 1 << 16


def count_call(path: Path) -> None:
    """Add a line to the file. Raises no exception, because commands do not depend on their count."""
    with suppress(OSError, ClusterctlError):
        with path.open("a") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"{time.time():.0f}\n")
            is_large = file.tell() > _MOST_BYTES
        if is_large:
            write_atomic(path, "".join(f"{second}\n" for second in _last_hour(path)))


def calls_of_last_hour(path: Path) -> int:
    """Return the number of commands in the last hour."""
    return len(_last_hour(path))


def _last_hour(path: Path) -> list[int]:
    text = path.read_text() if path.exists() else ""
    seconds = [int(line) for line in text.splitlines() if line.isdecimal()]
    return [second for second in seconds if second > time.time() - HOUR_S]
