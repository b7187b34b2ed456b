"""The journal of agents: each call, before it is carried out and after, on disk.

Several servers share the journal. ``lock`` lets one at a time read what is used, and write.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.state.workspace import state_home
from clusterctl.util.disk import append_line, translating_write_errors

# In the state folder. No cluster has a name with a dot.
FOLDER: Final = ".agent"
_FILE: Final = "journal.jsonl"
_LOCK: Final = "lock"


@dataclass(slots=True)
class RecordedCall:
    """A call of an agent.

    node_hours: the most that its jobs can use. None: unknown, and the user allows that.
    code: how it ended: "ok" or the code of its error; "": it runs, or its server was killed.
    cause: the sentence of its error.
    jobs: the IDs of the jobs that it submitted.
    """

    id: str
    time: float
    verb: str
    arguments: Mapping[str, Any]
    project: str
    node_hours: float | None = 0.0
    code: str = ""
    cause: str = ""
    jobs: Sequence[str] = ()
    seconds: float | None = None


class Journal:
    """The journal in a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or state_home() / FOLDER
        self.path = self.folder / _FILE

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Let no other process write in the ``with`` block, nor another thread."""
        with translating_write_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def calls(self) -> dict[str, RecordedCall]:
        """Return id -> call, the oldest first. Lines that can't be read are skipped."""
        calls: dict[str, RecordedCall] = {}
        with translating_write_errors(self.path), suppress(FileNotFoundError):
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
                    _apply(calls, json.loads(line))
        return calls

    def begin(self, verb: str, arguments: Mapping[str, Any], *, project: str) -> str:
        """Write that a call is decided and carried out from now on. Return its id."""
        call = secrets.token_hex(6)
        with self.lock():
            self._write("begin", call, verb=verb, arguments=dict(arguments), project=project)
        return call

    def reserve(self, call: str, node_hours: float | None) -> None:
        """Write how much a call can use. The caller holds the lock."""
        self._write("reserve", call, node_hours=node_hours)

    def end(
        self,
        call: str,
        code: str,
        *,
        cause: str = "",
        jobs: Collection[str],
        seconds: float,
        free: bool,
    ) -> None:
        """Write how a call ended. free: it has used nothing."""
        values = {"code": code, "cause": cause, "jobs": [*jobs], "free": free}
        with self.lock():
            self._write("end", call, **values, seconds=round(seconds, 3))

    def _write(self, event: str, call: str, **values: Any) -> None:
        row = {"event": event, "call": call, "time": round(time.time(), 3), **values}
        append_line(self.path, json.dumps(row))


def _apply(calls: dict[str, RecordedCall], row: Mapping[str, Any]) -> None:
    """Add a line of the journal to the calls."""
    call_id = str(row["call"])
    if row["event"] == "begin":
        calls[call_id] = RecordedCall(
            id=call_id,
            time=float(row["time"]),
            verb=str(row["verb"]),
            arguments=dict(row["arguments"]),
            project=str(row["project"]),
        )
        return
    call = calls[call_id]
    if row["event"] == "reserve":
        hours = row["node_hours"]
        call.node_hours = None if hours is None else float(hours)
    elif row["event"] == "end":
        call.code = str(row["code"])
        call.cause = str(row["cause"])
        call.jobs = [str(job) for job in row["jobs"]]
        call.seconds = float(row["seconds"])
        if row["free"]:
            call.node_hours = 0.0
