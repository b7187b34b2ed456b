"""What a crash can do to a state."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

from clusterctl.state.workspace import write_atomic
from clusterctl.util.progress import LineReporter

STATE_FILE: Final = "terraform.tfstate"
ERRORED_FILE: Final = "errored.tfstate"  # written by Terraform where it could not write the state


def mend_torn(folder: Path, report: LineReporter) -> None:
    """Put the state of the run before in place of a local state that is torn.

    Terraform writes the file in place: killed in that moment, it leaves an empty file, which it then takes
    for no state at all; on a full disk a part, which it refuses. Where there is no state before, none is put
    in its place. What was made since is found by its name when it is to be made again.
    """
    path, backup, errored = folder / STATE_FILE, folder / f"{STATE_FILE}.backup", folder / ERRORED_FILE
    if errored.is_file() and not _is_whole(errored):
        errored.unlink()
    has_backup = _is_whole(backup)
    if not path.is_file() or _is_whole(path) or not (has_backup or path.stat().st_size):
        return
    report("the state was torn when Terraform wrote it: going on from the one before")
    path.rename(folder / f"{STATE_FILE}.torn-{time.strftime('%Y%m%dT%H%M%S')}")
    if has_backup:
        write_atomic(path, backup.read_bytes())


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False
