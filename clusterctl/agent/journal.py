"""The journal of agents: each call, before it is carried out and after, on disk.

A call whose end is missing, because its server was killed, counts at its bound for a day. Several
servers share the journal; ``lock`` lets one at a time decide and write.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterctl.state.workspace import state_home
from clusterctl.util.disk import append_line, translating_write_errors

# In the state folder. No cluster has a name with a dot.
FOLDER: Final = ".agent"
_FILE: Final = "journal.jsonl"
_LOCK: Final = "lock"
# The code of a call that succeeded.
DONE: Final = "ok"


@dataclass(frozen=True, slots=True)
class CallBound:
    """The most that a call can use. None: unknown. ``jobs`` counts each task of an array; ``nodes``
    are those of a cluster.
    """

    jobs: int | None = 0
    node_hours: float | None = 0.0
    usd: float | None = 0.0
    nodes: int = 0


FREE: Final = CallBound()


@dataclass(slots=True)
class RecordedCall:
    """A call of an agent.

    cluster: its name, and what tells it from another cluster of this name.
    code: how it ended: DONE or the code of its error; "": it runs, or its server was killed.
    refused: whether it was not carried out.
    jobs: the IDs of the jobs that it submitted.
    """

    id: str
    time: float
    verb: str
    arguments: Mapping[str, Any]
    project: str
    cluster: str
    bound: CallBound
    code: str = ""
    refused: bool = False
    jobs: Sequence[str] = ()
    seconds: float | None = None


@dataclass(slots=True)
class History:
    """What the journal tells.

    failures: (time, failed jobs in a row at that time): none when the user ran `clusterctl agent
        resume`; those before a `down` or `detach`, which removes what the cluster's ledger tells of its jobs.
    """

    calls: dict[str, RecordedCall] = field(default_factory=dict)
    failures: list[tuple[float, int]] = field(default_factory=list)

    def jobs_of(self, cluster: str) -> set[str]:
        return {job for call in self.calls.values() if call.cluster == cluster for job in call.jobs}


class Journal:
    """The journal in a folder. Lines that another server writes are seen at the next ``read``."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or state_home() / FOLDER
        self.path = self.folder / _FILE
        self._offset = 0
        # The line before the offset.
        self._last = b""
        self._history = History()

    @contextmanager
    def lock(self) -> Iterator[History]:
        """Let no other server decide or write in the ``with`` block. Yield what the journal tells."""
        with translating_write_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with translating_write_errors(self.path):
                history = self.read()
            yield history
        finally:
            os.close(fd)

    def read(self) -> History:
        """Read what was added since the last call, and return what the journal tells. Threads that
        share a journal call ``lock``.
        """
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset - len(self._last))
            # A user has emptied or replaced the file: calls of before still count in this server.
            if file.read(len(self._last)) != self._last:
                self._offset, self._last = file.seek(0), b""
            for line in file:
                # The end of the last line is still being written.
                if not line.endswith(b"\n"):
                    break
                self._offset, self._last = self._offset + len(line), line
                row = None
                with suppress(ValueError, RecursionError):
                    row = json.loads(line)
                if isinstance(row, dict):
                    with suppress(KeyError, TypeError, ValueError, AttributeError):
                        _apply(self._history, row)
        return self._history

    def begin(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        *,
        project: str,
        cluster: str,
        bound: CallBound,
    ) -> str:
        """Write that a call is carried out from now on. Return its id."""
        call = secrets.token_hex(6)
        self._write(
            "begin",
            call,
            verb=verb,
            arguments=dict(arguments),
            project=project,
            cluster=cluster,
            bound=asdict(bound),
        )
        return call

    def refuse(
        self, verb: str, arguments: Mapping[str, Any], *, project: str, cluster: str, code: str
    ) -> None:
        """Write that a call was refused."""
        self._write(
            "refuse",
            secrets.token_hex(6),
            verb=verb,
            arguments=dict(arguments),
            project=project,
            cluster=cluster,
            code=code,
        )

    def end(
        self, call: str, code: str, *, jobs: Collection[str], seconds: float, free: bool
    ) -> None:
        """Write how a call ended. free: it can have used nothing."""
        self._write("end", call, code=code, jobs=list(jobs), seconds=round(seconds, 3), free=free)

    def keep(self, failures: int, used: Mapping[str, tuple[float | None, float | None]]) -> None:
        """Write what a cluster's ledger tells, before it is removed: failed jobs in a row, and
        call -> (node hours, usd) of the calls whose jobs have ended.
        """
        self._write("keep", "", failures=failures, used=dict(used))

    def resume(self) -> None:
        """Write that the user lets agents submit again after failed jobs."""
        self._write("resume", "")

    def _write(self, event: str, call: str, **values: Any) -> None:
        row = {"event": event, "call": call, "time": round(time.time(), 3), **values}
        append_line(self.path, json.dumps(row))


def _apply(history: History, row: Mapping[str, Any]) -> None:
    """Add a line of the journal to the history."""
    event = row["event"]
    seconds = float(row["time"])
    if event == "resume":
        history.failures.append((seconds, 0))
        return
    if event == "keep":
        history.failures.append((seconds, int(row["failures"])))
        for ended, (node_hours, usd) in row["used"].items():
            history.calls[ended].bound = CallBound(0, node_hours, usd)
        return
    call_id = str(row["call"])
    if event in {"begin", "refuse"}:
        history.calls[call_id] = RecordedCall(
            id=call_id,
            time=seconds,
            verb=str(row["verb"]),
            arguments=dict(row["arguments"]),
            project=str(row["project"]),
            cluster=str(row["cluster"]),
            bound=CallBound(**row.get("bound", {})),
            code=str(row.get("code", "")),
            refused=event == "refuse",
        )
        return
    call = history.calls[call_id]
    if event == "end":
        call.code = str(row["code"])
        call.jobs = [str(job) for job in row["jobs"]]
        call.seconds = float(row["seconds"])
        if row["free"]:
            call.bound = FREE
