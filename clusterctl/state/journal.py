"""The journal of phases, with the hash of their inputs and their duration: one JSON object a line."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterctl.errors import DiskError
from clusterctl.util.disk import append_line, read_rows


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished phase: ``seconds`` of wall time, ``at`` the Unix time of its end."""

    verb: str
    phase: str
    inputs: str
    seconds: float
    at: float
    ok: bool
    note: str = ""


def digest(*parts: str | bytes) -> str:
    """A short stable hash of a phase's inputs."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()[:16]


@dataclass(slots=True)
class Step:
    """Given to the body of a phase, which may set a note for the table; ``seconds`` is set at its end."""

    note: str = ""
    seconds: float = 0.0


class Journal:
    """Appends to one file, unless its disk is full."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def phase(self, verb: str, name: str, *, inputs: str = "") -> Iterator[Step]:
        """Time the body and record its outcome."""
        step = Step()
        start = time.monotonic()
        ok = False
        try:
            yield step
            ok = True
        finally:
            step.seconds = round(time.monotonic() - start, 3)
            self._append(Entry(verb, name, inputs, step.seconds, time.time(), ok, step.note))

    def entries(self) -> tuple[Entry, ...]:
        """All phases so far, oldest first."""
        entries = []
        for row in read_rows(self.path):
            with suppress(TypeError):  # of another version
                entries.append(Entry(**row))
        return tuple(entries)

    def _append(self, entry: Entry) -> None:
        if not self.path.parent.is_dir():  # `down` has removed the workspace
            return
        with suppress(DiskError):  # what was done counts, not the note of it; and `down` needs no disk
            append_line(self.path, json.dumps(asdict(entry), separators=(",", ":")))
