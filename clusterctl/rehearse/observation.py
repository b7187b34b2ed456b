"""The observation of a job in a rehearsal: starts and ends, steps, and checkpoints, as they
appear.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

from clusterctl.errors import SchedulerError
from clusterctl.scheduler.history import Attempt, attempts_of
from clusterctl.transport.base import Transport, split_lines

# The job's script names the payload that the job uses.
_OBSERVE: Final = """\
. <(grep -E '^payload=' "$2"/job.sbatch) && exec python3 -IS "$payload"/payload/node/observe.py "$@\""""
# The resolution of a file's times.
TICK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """A checkpoint that the job has written.

    number: the number in its name. save_s: the seconds from its creation to its final name. None:
        unknown.
    """

    path: str
    number: int | None
    time: float
    size: int
    save_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the checkpoint as `-o json` shows it."""
        return {"path": self.path, "time": self.time, "bytes": self.size, "save_s": self.save_s}


@dataclass(slots=True)
class Observation:
    """A job's attempts, steps with their times, and checkpoints in the order of their writes.

    numbered: whether only files with numbers in their names are checkpoints.
    fault_at: the time of the fault; None: it was not caused. killed: the node that was killed and
        is off.
    state: the job's final state. "": it has not ended.
    waits, waits_s: why it is in the queue, or was when it was given up, and for how long. "": it is
        not.
    """

    job_id: str
    folder: str
    numbered: bool = False
    history: Sequence[Attempt] = (Attempt(),)
    steps: list[tuple[float, int]] = field(default_factory=list)
    writes: list[CheckpointWrite] = field(default_factory=list)
    fault_at: float | None = None
    killed: str = ""
    state: str = ""
    waits: str = ""
    waits_s: float = 0.0

    def add(self, look: Mapping[str, Any]) -> None:
        """Add an answer of payload/node/observe.py."""
        self.history = attempts_of(look["events"]) if look["events"] else self.history
        self.steps += [(float(time), int(step)) for time, step in look["steps"]]
        seen = {(write.path, write.time) for write in self.writes}
        # Other files came with the job.
        new = (
            CheckpointWrite(path, number, time, size, save_s)
            for path, (number, time, size, save_s) in look["checkpoints"].items()
            if (path, time) not in seen
            and self.starts
            and time >= self.starts[0]
            and (number is not None or not self.numbered)
        )
        self.writes += sorted(new, key=lambda write: write.time)

    def select_checkpoints(self) -> None:
        """Forget checkpoints without numbers if some have numbers: they may be models for
        evaluation.
        """
        numbered = [write for write in self.writes if write.number is not None]
        self.numbered = bool(numbered)
        self.writes = numbered or self.writes

    @property
    def starts(self) -> list[float]:
        return [each.started for each in self.history if each.started is not None]

    @property
    def has_ended(self) -> bool:
        """Whether the job's own record has its end: success, or the reason against a restart."""
        last = self.history[-1]
        return bool(last.stop) or last.status == 0

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last event."""
        last = self.history[-1].last
        return last - self.starts[0] if self.starts and last is not None else 0.0

    @property
    def restarted(self) -> float | None:
        """The time of the first start after the fault."""
        return next((at for at in self.starts if self.fault_at and at > self.fault_at), None)

    @property
    def last_step_before(self) -> int:
        """The largest step before the restart, or of the whole job if it was not restarted."""
        until = self.restarted or float("inf")
        return max((step for at, step in self.steps if at < until), default=0)

    @property
    def last_step(self) -> int:
        """The largest step of all attempts. 0: the job does not show its steps."""
        return max((step for _, step in self.steps), default=0)

    @property
    def first_step_after(self) -> tuple[float, int] | None:
        """Time and number of the first step after the restart, if it is known."""
        since = self.restarted
        return next(((at, step) for at, step in self.steps if since and at > since), None)

    @property
    def again_s(self) -> float | None:
        """Seconds from the fault until the job continued: to its first step, or else to its new
        start.
        """
        if self.fault_at is None or self.restarted is None:
            return None
        first = self.first_step_after
        return (first[0] if first else self.restarted) - self.fault_at

    @property
    def save_s(self) -> float | None:
        """The median of the seconds that the job took to write a checkpoint, at least
        ``TICK_S``.
        """
        seconds = [write.save_s for write in self.writes if write.save_s is not None]
        return max(TICK_S, median(seconds)) if seconds else None

    @property
    def interval_s(self) -> float | None:
        """The median of the seconds between two checkpoints."""
        times = sorted({write.time for write in self.writes})
        return median(after - before for before, after in pairwise(times)) if times[1:] else None


def looks_of(transport: Transport, folder: str) -> Generator[dict[str, Any], None, None]:
    """Yield the answers of payload/node/observe.py about a job's folder, a few per second, without
    end.
    """
    stream = transport.stream(["bash", "-c", _OBSERVE, "observe", "watch", folder])
    try:
        for line in split_lines(stream, _unusable("a line is too long")):
            yield json.loads(line)
    finally:
        stream.close()


def results_of(transport: Transport, folder: str) -> dict[str, Any]:
    """Return the hashes of a job's files, and the lines of its output (see
    payload/node/observe.py).
    """
    result = transport.run(["bash", "-c", _OBSERVE, "observe", "results", folder], timeout_s=600)
    try:
        return dict(json.loads(result.stdout))
    except ValueError as exc:
        raise _unusable(result.reason) from exc


def _unusable(reason: str) -> SchedulerError:
    return SchedulerError(
        "the job's folder could not be observed", code="internal", about="observation", why=reason
    )
