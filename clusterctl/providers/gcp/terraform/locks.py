"""A lock on a remote state that outlived its Terraform: released only if that was one of ours, and is dead.

A local state needs none of this: the kernel drops its lock. A bucket's lock says who took it and when, but
not which process; so each run of ours is noted beside the state while it lasts. A note that outlived its run
is of one that was killed, since no two of ours are at work on a folder at once.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from clusterctl.providers.gcp.terraform.events import Diagnostic
from clusterctl.state.workspace import write_atomic

_SUMMARY: Final = "Error acquiring the state lock"
_FIELD: Final = re.compile(r"^\s*(ID|Who|Created):\s+(.*?)\s*$", re.MULTILINE)
_NOTES: Final = ".clusterctl.runs"
_SOON: Final = timedelta(seconds=120)  # a run takes its lock within that time
_KEPT: Final = 50


@dataclass(frozen=True, slots=True)
class Lock:
    """Who holds a state: ``who`` is user@host."""

    id: str
    who: str
    created: datetime


def held(failed: Iterable[Diagnostic]) -> Lock | None:
    """The lock that was in the way, if one was."""
    for diagnostic in failed:
        fields = dict(_FIELD.findall(diagnostic.detail))
        if diagnostic.summary == _SUMMARY and {"ID", "Who", "Created"} <= fields.keys():
            day, clock = fields["Created"].split()[:2]
            created = datetime.fromisoformat(f"{day}T{clock[:15]}+00:00")  # Go's nanoseconds, UTC
            return Lock(fields["ID"], fields["Who"], created)
    return None


def is_left_behind(lock: Lock, folder: Path, *, before: float) -> bool:
    """Whether a run of ours on this folder and machine took it, which did not come to its end.

    ``before`` (Unix seconds) is when the run began that it was in the way of: some backends name that run's
    own wish for a lock instead of the lock.
    """
    me = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    asked = datetime.fromtimestamp(before).astimezone()
    return (
        lock.who == me
        and lock.created < asked
        and any(began <= lock.created <= began + _SOON for began in map(_moment, _notes(folder)))
    )


def forget(folder: Path) -> None:
    """Forget the runs that did not come to their end."""
    (folder / _NOTES).unlink(missing_ok=True)


@contextmanager
def noted(folder: Path) -> Iterator[None]:
    """Note a run while it lasts; the caller holds the folder's lock."""
    mine = f"{time.time():.6f}"
    _write(folder, [*_notes(folder)[-_KEPT:], mine])
    try:
        yield
    finally:
        _write(folder, [note for note in _notes(folder) if note != mine])


def _moment(note: str) -> datetime:
    return datetime.fromtimestamp(float(note)).astimezone()


def _notes(folder: Path) -> list[str]:
    try:
        return [note for note in (folder / _NOTES).read_text().split() if note.replace(".", "").isdigit()]
    except FileNotFoundError:
        return []


def _write(folder: Path, notes: list[str]) -> None:
    if notes:
        write_atomic(folder / _NOTES, "\n".join(notes) + "\n")
    else:
        forget(folder)
