"""The attempts of a job, read from the file job.events of payload/node/job.py: starts, ends and restarts.

The job can write to the file, so every value may be wrong or missing.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from clusterctl.spec.units import format_duration
from clusterctl.util.terminal import plain_line

EVENTS_FILE: Final = "job.events"
_LONGEST: Final = 500  # characters
_MOST_NODES: Final = 8
_SAVED: Final = "saved"
_LATEST: Final = 1 << 37  # Unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The end of an attempt of a job, and the start of the next attempt. Times are Unix seconds.

    cause: how the attempt ended, such as ``SIGKILL in rank 1 on n2``.
    reason: why job.py requeued the job (saved, failed, hang), or "" if Slurm or a person did.
    status: exit status of the program. ended: None if the end was not recorded. nodes: of the ended attempt.
    noticed_s: from the last progress of a hung program to its end.
    again_s: from the end to the first record of the next attempt. If the end is unknown, from the last record
        before it that the next attempt has kept.
    steps_lost: steps that the next attempt repeated.
    None: unknown.
    """

    number: int
    cause: str
    reason: str
    status: int | None
    nodes: tuple[str, ...]
    ended: float | None
    started: float
    noticed_s: int | None = None
    again_s: float | None = None
    steps_lost: int | None = None

    def __str__(self) -> str:
        """Return a line such as ``restart 1 at 12:03:05 UTC: SIGKILL in rank 1 on n2; started after 9s``."""
        waited = None if self.ended is None else self.started - self.ended
        spans = {
            "noticed after": self.noticed_s,
            "started after": waited,
            "training again after": self.again_s,
        }
        words = [f"{key} {format_duration(max(0, round(s)))}" for key, s in spans.items() if s is not None]
        words += [] if self.steps_lost is None else [f"{self.steps_lost} steps lost"]
        at = datetime.fromtimestamp(self.ended or self.started, UTC)
        return f"restart {self.number} at {at:%H:%M:%S} UTC: {'; '.join([self.cause, *words])}"

    def as_dict(self) -> dict[str, Any]:
        """Return the restart as `-o json` and run.json show it."""
        return {**asdict(self), "nodes": list(self.nodes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAttempt:
    """The last attempt of a job. number: how often Slurm has restarted the job.

    stop: why job.py did not requeue the job, such as same-error. "": it did not decide so.
    hang, hang_s: the ranks that made no progress, in words, and for how long. "" if the job did not hang.
    """

    number: int = 0
    stop: str = ""
    hang: str = ""
    hang_s: int = 0


Event = Mapping[str, Any]


def events_of(text: str) -> tuple[Event, ...]:
    """Return the valid events in the text of job.events, in order."""
    events = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and (time := _number(event, "time")) is not None:
                events.append({**event, "time": time})
    return tuple(events)


def last_attempt(events: Sequence[Event]) -> LastAttempt:
    """Return the last attempt of a job, from its events."""
    start, later = _attempts(events)[-1]
    stop, hang = _last(later, "stop"), _hang(later)
    return LastAttempt(
        number=int(_number(start, "restarts") or 0),
        stop=_text(stop, "reason"),
        hang=_text(hang, "summary"),
        hang_s=int(_number(hang, "seconds") or 0),
    )


def restarts_of(events: Sequence[Event], records: Iterable[tuple[float, int]] = ()) -> tuple[Restart, ...]:
    """Return the restarts of a job, from its events.

    records: time and step of each record of metrics that the program wrote.
    """
    steps = sorted(records)
    restarts = []
    for number, ((start, later), (following, _)) in enumerate(pairwise(_attempts(events)), 1):
        restart = _restart(number, start, later, following)
        at = bisect_left(steps, (following["time"], 0))
        if at < len(steps):
            last_step: Any = next(iter(_list(_failure(later, following), "progress")[1:]), None)
            is_step = isinstance(last_step, int) and 0 < last_step < _LATEST
            since = restart.ended or (steps[at - 1][0] if at else None)
            restart = replace(
                restart,
                again_s=None if since is None else round(steps[at][0] - since, 3),
                steps_lost=max(0, last_step - steps[at][1] + 1) if is_step else None,
            )
        restarts.append(restart)
    return tuple(restarts)


def _restart(number: int, start: Event, later: Sequence[Event], following: Event) -> Restart:
    """Return a restart.

    number: used if Slurm has not counted the restart, because a power cut took slurmctld's record of it.
    later: events of the ended attempt.
    """
    requeue, hang = _last(later, "requeue"), _hang(later)
    end = _last(later, "end") or requeue
    status = _number(end, "status")
    nodes = tuple(_text({"name": node}, "name") for node in _list(start, "nodes"))
    return Restart(
        number=int(_number(following, "restarts") or number),
        cause=_cause(_failure(later, following), requeue, hang, status, nodes),
        reason=_text(requeue, "reason"),
        status=None if status is None else int(status),
        nodes=nodes,
        ended=_number(end, "time"),
        started=following["time"],
        noticed_s=int(_number(hang, "seconds") or 0) if hang else None,
    )


def _failure(later: Sequence[Event], following: Event) -> Event:
    """Return the event that describes the end of an attempt: if a node was lost, the next start."""
    requeue = _last(later, "requeue")
    return requeue if "kind" in requeue else following


def _cause(failure: Event, requeue: Event, hang: Event, status: float | None, nodes: Sequence[str]) -> str:
    kind, reason = _text(failure, "kind"), _text(requeue, "reason")
    if hang:
        return f"no progress: {_text(hang, 'summary') or 'ranks unknown'}"
    if reason == _SAVED:
        return "the program saved its work"
    if kind:
        error = _text(failure, "error") or kind.replace(",", ", ")
        return " in ".join(filter(None, (error, _text(failure, "place"))))
    if status:
        return f"exit status {int(status)}"
    on = f" on {', '.join(nodes[:_MOST_NODES])}" if nodes else ""
    return f"no end was recorded{on}, because a node was lost or Slurm requeued the job"


def _last(events: Sequence[Event], name: str) -> Event:
    return next((event for event in reversed(events) if event.get("event") == name), {})


def _hang(events: Sequence[Event]) -> Event:
    """Return the last hang that ended the program. After a warning, the program may have continued."""
    return _last([event for event in events if event.get("action") != "warn"], "hang")


def _attempts(events: Sequence[Event]) -> list[tuple[Event, list[Event]]]:
    """Return each attempt as its start and its later events. Without a start: a single, empty attempt."""
    attempts: list[tuple[Event, list[Event]]] = []
    for event in events:
        if event.get("event") == "start":
            attempts.append((event, []))
        elif attempts:
            attempts[-1][1].append(event)
    return attempts or [({}, [])]


def _text(event: Event, key: str) -> str:
    value = event.get(key)
    return plain_line(value)[:_LONGEST] if isinstance(value, str) else ""


def _list(event: Event, key: str) -> Sequence[Any]:
    value = event.get(key)
    return value if isinstance(value, list) else ()


def _number(event: Event, key: str) -> float | None:
    value: Any = event.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value < _LATEST else None
