"""The attempts of a job, read from the file job.events of payload/node/job.py: starts, ends and
restarts.

The job can write to the file, so every value may be wrong or missing.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from clusterctl.spec.alarms import ALARMS
from clusterctl.spec.units import format_duration
from clusterctl.util.terminal import plain_line

EVENTS_FILE: Final = "job.events"
_LONGEST: Final = 500  # characters
_MOST_NODES: Final = 8
_SAVED: Final = "saved"
_LATEST: Final = 1 << 37  # Unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A time in which a job had its nodes. Unix seconds. end_time: None while it lasts.

    state: Slurm's state of an attempt that has ended, such as PREEMPTED. "": unknown.
    """

    start_time: int
    end_time: int | None = None
    nodes: tuple[str, ...] = ()
    state: str = ""

    @property
    def seconds(self) -> int:
        """Duration; until now, by the local clock, if the attempt lasts."""
        return max(
            0, (int(time.time()) if self.end_time is None else self.end_time) - self.start_time
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The end of an attempt of a job, and the start of the next attempt. Times are Unix seconds.

    cause: how the attempt ended, such as ``SIGKILL in rank 1 on n2``.
    reason: why job.py requeued the job (saved, failed, hang), or "" if Slurm or a person did.
    status: exit status of the program. ended: None if the end was not recorded. nodes: of the ended
        attempt.
    noticed_s: from the last progress of a hung program to its end.
    again_s: from the end to the first record of the next attempt. If the end is unknown, from the
        last record before it that the next attempt has kept.
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
        """Return a line such as ``restart 1 at 12:03:05: SIGKILL in rank 1 on n2; started after
        9s``.

        The time is this host's.
        """
        return self.line(datetime.fromtimestamp(self.ended or self.started, UTC).astimezone())

    @property
    def in_utc(self) -> str:
        """The line for documents, which other people also read: its time is in UTC, and says so."""
        return self.line(datetime.fromtimestamp(self.ended or self.started, UTC), " UTC")

    def line(self, at: datetime, zone: str = "") -> str:
        """Return the restart in words, with this time of it."""
        waited = None if self.ended is None else self.started - self.ended
        spans = {
            "noticed after": self.noticed_s,
            "started after": waited,
            "training again after": self.again_s,
        }
        words = [
            f"{key} {format_duration(max(0, round(s)))}"
            for key, s in spans.items()
            if s is not None
        ]
        if self.steps_lost is not None:
            words.append(f"{self.steps_lost} steps lost")
        return f"restart {self.number} at {at:%H:%M:%S}{zone}: {'; '.join([self.cause, *words])}"

    def as_dict(self) -> dict[str, Any]:
        """Return the restart as `-o json` and run.json show it."""
        return {**asdict(self), "nodes": list(self.nodes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A time in which all ranks of a job waited without progress. Times are Unix seconds.

    summary: where the ranks were, such as ``rank 7 on n2 is waiting in MPI at train.py:88``.
    since: time of the last progress. noticed: when hang.py recorded the hang.
    until: the next progress, the end of the program, or the last time at which the job is known to
        hang.
    ended_job: whether hang.py then ended the program.
    """

    summary: str
    since: float
    noticed: float
    until: float
    ended_job: bool = False

    def __str__(self) -> str:
        """Return a line such as ``no progress for 90s: rank 7 on n2 is waiting in MPI at
        train.py:88``.
        """
        return f"no progress for {self.duration}: {self.summary or 'ranks unknown'}"

    @property
    def duration(self) -> str:
        return format_duration(max(0, round(self.until - self.since)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A time in which a job wasted what it had, such as idle GPUs. Times are Unix seconds.

    kind: see spec/alarms.py. summary: such as ``GPU 1 of n2 is idle: no process uses it``.
    since: since when. until: its end, the end of the program, or the last time at which it lasted.
    ended_job: whether alarms.py then ended the program.
    """

    kind: str
    summary: str
    since: float
    until: float
    ended_job: bool = False

    def __str__(self) -> str:
        """Return a line such as ``GPU 1 of n2 is idle: no process uses it, for 31m``."""
        return f"{self.summary}, for {format_duration(max(0, round(self.until - self.since)))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAttempt:
    """The last attempt of a job. number: how often Slurm has restarted the job.

    stop: why job.py did not requeue the job, such as same-error. "": it did not decide so.
    signal: the last signal that the job was sent, such as SIGUSR1. "": no signal.
    hang: the hang that lasts, or lasted until the end. None: there is no such hang.
    alarms: likewise, at most one of each kind.
    port: MASTER_PORT of the attempt; 0 if it is unknown.
    how: how the program ended: "exit", or the name of a signal. "": unknown, or a launcher's.
    is_open: whether job.py has recorded the start, but neither the end nor SIGTERM, by which Slurm
        ends jobs.
    """

    number: int = 0
    stop: str = ""
    signal: str = ""
    hang: Hang | None = None
    alarms: tuple[Alarm, ...] = ()
    port: int = 0
    how: str = ""
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the last attempt of a job ended, by its events. Times are Unix seconds. None: unknown.

    state: a state of Slurm, such as COMPLETED or TIMEOUT.
    is_recorded: whether the events tell the end. Otherwise the job was killed, or its node was
        lost.
    ended: time of the last event, if the end is not recorded.
    """

    state: str
    reason: str = ""
    is_recorded: bool = True
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    partition: str = ""
    restarts: int = 0
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What an attempt of a job recorded of its program. Times are Unix seconds.

    ended: when the program ended; None if that was not recorded. last: time of the last event.
    reached: the last step that the program had recorded by then; 0 if it is unknown.
    """

    started: float
    ended: float | None
    last: float
    reached: int


Event = Mapping[str, Any]
# States in which Slurm itself ends a job.
_BY_SLURM: Final = frozenset("CANCELLED TIMEOUT PREEMPTED NODE_FAIL".split())
# The same as causes of a restart.
_TOLD: Final = MappingProxyType(
    {
        "PREEMPTED": "preempted by a job of higher priority",
        "REQUEUED": "requeued by its user or an administrator",
        "TIMEOUT": "its time limit was reached",
        "NODE_FAIL": "a node of the job failed",
        "CANCELLED": "cancelled, and requeued by its user or an administrator",
    }
)
_EX_TEMPFAIL: Final = 75
_UNSEEN: Final = "a node was lost, the job's processes were killed, or Slurm requeued the job"
# The clocks of a node and of the controller may differ by this time.
SKEW_S: Final = 2
# So long after its start in Slurm, an attempt has recorded its start.
_LAUNCH_S: Final = 15
# Slurm ends a job up to this time before the end that it has told the job.
_EARLY_S: Final = 5
_NEVER: Final = "the job was cancelled before it started"
_NOT_AGAIN: Final = "the job was requeued, and cancelled before it started again"
_NOT_FIRST: Final = "another job of `submit --first` ran, or clusterctl chose no job in time"
_NO_END: Final = "the job recorded no end: its processes were killed, or its node was lost"


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
    hangs = [hang for hang, has_ended in _hangs(later) if not has_ended]
    return LastAttempt(
        number=int(_number(start, "restarts") or 0),
        stop=_text(_last(later, "stop"), "reason"),
        signal=_text(_last(later, "signal"), "signal"),
        hang=hangs[-1] if hangs else None,
        alarms=tuple(alarm for alarm, has_ended in _alarms(later) if not has_ended),
        is_open=bool(start) and not (_last(later, "end", "requeue", "stop") or _last_term(later)),
        port=int(_number(start, "port") or 0),
        how=_text(_last(later, "end"), "how"),
    )


def ending_of(events: Sequence[Event]) -> Ending:
    """Return how a job ended that Slurm's queue has forgotten, from its events."""
    if not events:
        return Ending(state="CANCELLED", reason=_NEVER)
    start, later = _attempts(events)[-1]
    later = later if start else [*events]
    facts: dict[str, Any] = {
        "nodes": _nodes(start),
        "partition": _text(start, "partition"),
        "restarts": int(_number(start, "restarts") or 0),
        "started": _number(start, "time"),
        "ended": later[-1]["time"] if later else _number(start, "time"),
    }
    by_slurm = _state_by_slurm(start, later)
    last = _last(later, "end", "requeue")
    if events[-1].get("event") == "not-first":
        return Ending(state="CANCELLED", reason=_NOT_FIRST, **facts)
    if by_slurm in _BY_SLURM:
        return Ending(state=by_slurm, **facts)
    if by_slurm or last.get("event") == "requeue":
        return Ending(state="CANCELLED", reason=_NOT_AGAIN, **facts)
    if last:
        status = int(_number(last, "status") or 0)
        facts["ended"] = last["time"]
        return Ending(state="FAILED" if status else "COMPLETED", exit_code=status, **facts)
    return Ending(state="FAILED", reason=_NO_END, is_recorded=False, **facts)


def _state_by_slurm(start: Event, later: Sequence[Event]) -> str:
    """Return the state in which Slurm has ended an attempt, REQUEUED if it has requeued the job,
    else "".
    """
    told = _last_term(later)
    state = _text(told, "state") if told else "RUNNING"
    if not state:
        until = _number(start, "until") or _LATEST
        return "TIMEOUT" if told["time"] >= until - _EARLY_S else "CANCELLED"
    return state if state in {*_BY_SLURM, "REQUEUED"} else ""


def program_seconds(events: Sequence[Event]) -> float | None:
    """Return how long the program ran in all attempts, by the job's events. None if an end is
    missing.
    """
    spans = [
        (start["time"], _last(later, "end").get("time"))
        for start, later in _attempts(events)
        if start
    ]
    ended = [end - start for start, end in spans if end is not None]
    return sum(ended) if spans and len(ended) == len(spans) else None


def nodes_of(events: Sequence[Event]) -> list[str]:
    """Return the nodes of all attempts of a job, from its events."""
    return [*dict.fromkeys(node for start, _ in _attempts(events) for node in _nodes(start))]


def recorded_attempts(
    events: Sequence[Event], times: Sequence[float]
) -> Iterator[tuple[Attempt, bool]]:
    """Yield each attempt in a job's record, and whether its end was recorded.

    times: in order, at which the job was running, such as those of telemetry. An attempt without a
        recorded end was killed, and ended after the last of these times.
    """
    starts = [(start, later) for start, later in _attempts(events) if start]
    following = [start["time"] for start, _ in starts[1:]]
    for (start, later), before in zip(starts, [*following, math.inf], strict=False):
        end = _last(later, "end") or _last(later, "requeue")
        last_times = [end["time"]] if end else [[start, *later][-1]["time"]]
        if not end:
            last_times += [time for time in times if start["time"] < time < before][-1:]
        last = math.ceil(max(last_times))
        yield Attempt(start_time=int(start["time"]), end_time=last, nodes=_nodes(start)), bool(end)


def _nodes(start: Event) -> tuple[str, ...]:
    return tuple(filter(None, (_text({"name": node}, "name") for node in _list(start, "nodes"))))


def hangs_of(events: Sequence[Event]) -> tuple[Hang, ...]:
    """Return the hangs of all attempts of a job, from its events."""
    return tuple(hang for _, later in _attempts(events) for hang, _ in _hangs(later))


def alarms_of(events: Sequence[Event]) -> tuple[Alarm, ...]:
    """Return the alarms of all attempts of a job, from its events."""
    return tuple(alarm for _, later in _attempts(events) for alarm, _ in _alarms(later))


def _alarms(events: Sequence[Event]) -> Iterator[tuple[Alarm, bool]]:
    """Yield each alarm among the events of an attempt, and whether it ended before the program."""
    for at, event in enumerate(events):
        if event.get("event") != "alarm":
            continue
        kind = _text(event, "kind")
        # The job's program may also write events.
        if kind not in ALARMS:
            continue
        after: Event = next(
            (
                later
                for later in events[at + 1 :]
                if later.get("event") == "end"
                or (later.get("event") in ("alarm", "alarm-over") and _text(later, "kind") == kind)
            ),
            {},
        )
        # An alarm that names more later is the same alarm.
        if after.get("event") == "alarm":
            continue
        alarm = Alarm(
            kind=kind,
            summary=_text(event, "summary"),
            since=event["time"] - (_number(event, "seconds") or 0),
            until=max(event["time"], _over_at(after)),
            ended_job=event.get("action") == "end",
        )
        yield alarm, after.get("event") == "alarm-over"


def _over_at(event: Event) -> float:
    """Return when an alarm ended, by the event after it. 0: there is no such event."""
    # The end of an alarm is recorded some time after its condition last held.
    waited_s = _number(event, "seconds") if event.get("event") == "alarm-over" else None
    return (_number(event, "time") or 0) - (waited_s or 0)


def traces_of(events: Sequence[Event]) -> tuple[Trace, ...]:
    """Return the traces of all attempts that recorded their start, from the events of a job."""
    attempts = [(start, later) for start, later in _attempts(events) if start]
    traces = []
    for (start, later), (after, _) in pairwise([*attempts, ({}, [])]):
        step = next(iter(_list(_failure(later, after), "progress")[1:]), None)
        trace = Trace(
            started=start["time"],
            ended=_number(_last(later, "end"), "time"),
            last=max(event["time"] for event in (start, *later)),
            reached=step if isinstance(step, int) and 0 < step < _LATEST else 0,
        )
        traces.append(trace)
    return tuple(traces)


def _hangs(events: Sequence[Event]) -> Iterator[tuple[Hang, bool]]:
    """Yield each hang among the events of an attempt, and whether there was progress after it."""
    for number, event in enumerate(events):
        if event.get("event") == "hang":
            kinds = ("progress", "end", "hang")
            after = next((each for each in events[number + 1 :] if each.get("event") in kinds), {})
            # hang.py warned, and recorded the same hang again when it ended the program.
            if after.get("event") == "hang":
                continue
            seconds = min(_number(event, "seconds") or 0.0, event["time"])
            # hang.py notices progress a moment later.
            age_s = min(max(0.0, _number(after, "age") or 0.0), SKEW_S)
            hang = Hang(
                summary=_text(event, "summary"),
                since=event["time"] - seconds,
                noticed=event["time"],
                until=max(event["time"], (_number(after, "time") or 0) - age_s),
                ended_job=event.get("action") != "warn",
            )
            yield hang, after.get("event") == "progress"


def restarts_of(
    events: Sequence[Event],
    records: Iterable[tuple[float, int]] = (),
    attempts: Iterable[Attempt] = (),
) -> tuple[Restart, ...]:
    """Return the restarts of a job, from its events.

    records: time and step of each record of metrics that the program wrote.
    attempts: those that Slurm knows. An attempt that was killed may not have recorded its start or
        its end.
    """
    steps = sorted(records)
    restarts = []
    known = {attempt.start_time: attempt for attempt in attempts}
    if missing := [*_unrecorded_starts(events, known)]:
        events = sorted([*events, *missing], key=lambda event: event["time"])
    for number, ((start, later), (following, _)) in enumerate(pairwise(_attempts(events)), 1):
        restart = _restart(number, start, later, following, _state_of(start, known))
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


def _unrecorded_starts(events: Sequence[Event], attempts: Mapping[int, Attempt]) -> Iterator[Event]:
    recorded = [event["time"] for event in events if event.get("event") == "start"]
    # If no start is missing, the clocks of hosts may differ by any time.
    for start, following in (
        pairwise([*sorted(attempts), math.inf]) if len(recorded) < len(attempts) else ()
    ):
        if not any(start - SKEW_S <= time < following - SKEW_S for time in recorded):
            nodes = [*attempts[int(start)].nodes]
            yield {"event": "start", "time": float(start), "nodes": nodes, "unrecorded": True}


def _state_of(start: Event, attempts: Mapping[int, Attempt]) -> str:
    """Return Slurm's state of the attempt with this start. "": unknown."""
    near = [attempt for at, attempt in attempts.items() if abs(at - start["time"]) <= _LAUNCH_S]
    return near[0].state if len(near) == 1 else ""


def _restart(
    number: int, start: Event, later: Sequence[Event], following: Event, state: str
) -> Restart:
    """Return a restart.

    number: used if Slurm has not counted the restart, because a power cut took slurmctld's record
        of it.
    later: events of the ended attempt. state: of the ended attempt in Slurm's accounting.
    """
    requeue = _last(later, "requeue")
    hang = next((hang for hang, _ in _hangs(later) if hang.ended_job), None)
    end = _last(later, "end") or requeue
    status = _number(end, "status")
    return Restart(
        number=int(_number(following, "restarts") or number),
        cause=(
            f"no progress: {hang.summary or 'ranks unknown'}"
            if hang
            else _cause(start, later, following, state)
        ),
        reason=_text(requeue, "reason"),
        status=None if status is None else int(status),
        nodes=_nodes(start),
        ended=_number(end, "time"),
        started=following["time"],
        noticed_s=int(hang.noticed - hang.since) if hang else None,
    )


def _failure(later: Sequence[Event], following: Event) -> Event:
    """Return the event that describes the end of an attempt: if a node was lost, the next start."""
    requeue = _last(later, "requeue")
    return requeue if "kind" in requeue else following


def _cause(start: Event, later: Sequence[Event], following: Event, state: str) -> str:
    """Return why an attempt ended, by what it recorded, and only without such a record by Slurm's
    state.
    """
    requeue = _last(later, "requeue")
    end = _last(later, "end")
    failure = _failure(later, following)
    status = _number(end or requeue, "status")
    kind = _text(failure, "kind")
    is_saved = status == _EX_TEMPFAIL or _text(requeue, "reason") == _SAVED
    # job.py of the next attempt knows more about a lost node.
    told = "" if failure is following and kind else _text(_last_term(later), "state")
    place = _text(failure, "place")
    notice = _notice(later)
    if told in _TOLD:
        saved = "; the program saved its work" if is_saved else ""
        if told == "TIMEOUT" and notice and not is_saved:
            saved = f"; the program did not save its work after the notice ({notice})"
        return _TOLD[told] + saved
    if _text(requeue, "reason") == _SAVED and kind in {"", _SAVED}:
        return "the program saved its work"
    if notice and kind == notice:
        subject = f"{place} does" if place else "the program does"
        return f"its time limit was near; {subject} not handle the notice ({notice})"
    if kind:
        # An exit code like that of a signal may be the program's own.
        code = _number(failure, "code")
        how = f"exit code {int(code)}" if code else kind.replace(",", ", ")
        error = _text(failure, "error") or how
        return " in ".join(filter(None, (error, place)))
    if status:
        return f"exit status {int(status)}"
    if status == 0:
        return "the job had completed, and was requeued"
    nodes = _nodes(start)
    on = f" on {', '.join(nodes[:_MOST_NODES])}" if nodes else ""
    if state == "REQUEUED":
        # Slurm also requeues a job by itself, such as after a failed Prolog.
        before = " before its program started" if "unrecorded" in start else ""
        return f"requeued by Slurm, its user or an administrator{on}{before}"
    if state in _TOLD:
        return _TOLD[state]
    return f"no end was recorded{on}: {_UNSEEN}"


def _last_term(events: Sequence[Event]) -> Event:
    told = (event for event in reversed(events) if event.get("event") == "signal")
    return next((event for event in told if event.get("signal") == "SIGTERM"), {})


def _notice(events: Sequence[Event]) -> str:
    """Return the signal that announced the time limit in an attempt, such as SIGUSR1, or ""."""
    return next((_text(event, "signal") for event in events if event.get("notice") is True), "")


def _last(events: Sequence[Event], *names: str) -> Event:
    return next((event for event in reversed(events) if event.get("event") in names), {})


def _attempts(events: Sequence[Event]) -> list[tuple[Event, list[Event]]]:
    """Return each attempt as its start and its later events. Without a start: a single, empty
    attempt.
    """
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
