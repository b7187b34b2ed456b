"""How a run used its time: seconds by use, from the submission to the end.

Each second counts once, so the uses sum to all of the time. A use is only what the scheduler, the
job's events, the program's metrics or telemetry show; the rest is ``running`` or ``unknown``. The
job can write all of these files, so every value may be wrong or missing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

from clusterctl.runs.curve import EPOCH, STEP
from clusterctl.runs.find import Row
from clusterctl.runs.metric_files import Block
from clusterctl.runs.series import history_in, sample_times
from clusterctl.runs.table import stored
from clusterctl.runs.telemetry_files import BEFORE, GPUS, IDLE, NodeFile
from clusterctl.scheduler.history import SKEW_S, Attempt, Event, Hang
from clusterctl.scheduler.slurm.values import GPU, amounts_of
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.run_record import RunRecord, TaskRecord
from clusterctl.util.numbers import finite


class TimeUse(StrEnum):
    """What a second of a run was used for.

    QUEUE: waiting for nodes, also between two attempts. STAGING: copying files to the nodes'
    disks. START_UP: before the program's first step.
    USEFUL: steps. REDONE: steps that an earlier attempt had done. CHECKPOINT, DATA: training
    waited for a checkpoint, or for its samples. HUNG: without progress for so long that it is
    called a hang. SUSPENDED: Slurm had stopped the job. IDLE: processors, GPUs and network did
    nothing. RUNNING: the program ran, and recorded nothing that divides the time. EXIT: after
    the program. UNKNOWN: the nodes were held, and nothing tells whether the program ran.
    """

    QUEUE = "queue"
    STAGING = "staging"
    START_UP = "start-up"
    USEFUL = "useful"
    REDONE = "redone"
    CHECKPOINT = "checkpoint"
    DATA = "data"
    EVALUATION = "evaluation"
    HUNG = "hung"
    SUSPENDED = "suspended"
    IDLE = "idle"
    RUNNING = "running"
    EXIT = "exit"
    UNKNOWN = "unknown"


# Telemetry can show that nothing was done in these.
_MAY_BE_IDLE: Final = frozenset({TimeUse.START_UP, TimeUse.USEFUL, TimeUse.REDONE, TimeUse.RUNNING})
_SHORTEST_IDLE_S: Final = 60.0
# All are in memory, 200 bytes each, as an attempt is divided as a whole.
_MOST_RECORDS: Final = 1 << 20
_Span = tuple[float, float]


class _Record(NamedTuple):
    """A line of metrics. time: when it was written, in Unix seconds. step: None if unknown.

    seconds: how long that took which it describes, as the program measured it. None: unknown.
    data_s: of them waiting for data. stall_s: how long saving has stopped training.
    """

    time: float
    kind: str
    step: float | None
    seconds: float | None = None
    data_s: float = 0.0
    stall_s: float = 0.0


class _Lost(NamedTuple):
    """Records that a resumed run has removed, between these times, with sums of their seconds.

    step: the last of them.
    """

    begin: float
    end: float
    step: float
    uses: Sequence[tuple[TimeUse, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEvidence:
    """What the folder of a job or array task shows of its time.

    history: the attempts that recorded their start. staged, hangs, idle: times in order, in Unix
        seconds. samples: times of telemetry, if the end of a program was not recorded.
    """

    history: Sequence[Attempt] = ()
    samples: Sequence[float] = ()
    staged: Sequence[_Span] = ()
    hangs: Sequence[_Span] = ()
    idle: Sequence[_Span] = ()
    records: Sequence[_Record] = ()
    lost: Sequence[_Lost] = ()

    @classmethod
    def of(cls, folder: Path, task: TaskRecord) -> TimeEvidence:
        """Read the folder of a job or array task, but for its metrics."""
        history = [attempt for attempt in history_in(folder) if attempt.start]
        needs_samples = any(attempt.ended is None for attempt in history)
        is_suspended = any(attempt.suspended_s for attempt in task.attempts)
        nodes = [*dict.fromkeys(node for attempt in task.attempts for node in attempt.nodes)]
        asked = amounts_of(task.tres)
        gpus = asked.get(GPU, 0.0) / max(1.0, asked.get("node", 1.0))
        return cls(
            history=history,
            samples=sample_times(folder, history) if needs_samples or is_suspended else (),
            staged=_merged(_staged_times(each for part in history for each in part.events)),
            idle=_idle_times(folder, nodes, gpus),
        )

    def with_records(self, records: Records) -> TimeEvidence:
        """Return the evidence with that of the metrics."""
        own, lost = records.parts()
        hangs = _hang_times((hang for part in self.history for hang in part.hangs), own)
        return replace(self, hangs=hangs, records=own, lost=lost)


def total_time_use(rows: Iterable[Row]) -> dict[str, float]:
    """Return the seconds of all tasks of these runs together by use, without uses of 0."""
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        for task in row.task_records:
            for use, seconds in task.time_use.items():
                sums[use] += seconds
    return {use: sums[use] for use in TimeUse if sums[use] > 0}


def find_time_use(run: RunRecord, task: TaskRecord, evidence: TimeEvidence) -> dict[str, float]:
    """Return the seconds of a job or array task by use, from its folder and the scheduler's times.

    They sum to the time from the submission to the end or, of a job that has not ended, until it
    was collected. Empty if there is no time.
    """
    attempts = task.attempts
    end: float | None = task.end_time
    is_packed = bool(task.number) and not run.is_array
    if end is None:
        end = (attempts[-1].end_time if attempts else None) if run.final else run.collected_at
    first = attempts[0].start_time if attempts else None
    begin = run.submit_time if run.submit_time is not None else first
    if begin is None or end is None or end <= begin:
        return {}
    if not attempts:
        return {TimeUse.QUEUE: end - begin}
    if is_packed:
        # A packed task has no events of its own. Its only attempt is its program.
        start: Event = {"event": "start", "time": attempts[0].start_time}
        program = Attempt(start, [{"event": "end", "time": end}])
        evidence = replace(evidence, history=[program])
    return divide(begin, attempts, end, evidence)


def divide(
    begin: float, attempts: Sequence[AttemptRecord], end: float, evidence: TimeEvidence
) -> dict[str, float]:
    """Return the seconds by use between the submission ``begin`` and ``end``, without uses of 0."""
    suspended = [span for each in attempts for span in _suspended(each, end, evidence)]
    line = _Line(begin, evidence.staged, evidence.hangs, evidence.idle, suspended)
    # Steps and epochs may begin at 0.
    reached = -math.inf
    starts = [*(float(attempt.start_time) for attempt in attempts), math.inf]
    recorded = [
        next((each for each in evidence.history if a <= (each.started or 0) + SKEW_S < b), None)
        for a, b in pairwise(starts)
    ]
    # Records have the clock of the job's events.
    firsts = [
        start - SKEW_S if own is None else own.started or 0.0
        for start, own in zip(starts, [*recorded, None], strict=True)
    ]
    for number, (attempt, own) in enumerate(zip(attempts, recorded, strict=True)):
        until = min(starts[number + 1], end if attempt.end_time is None else attempt.end_time)
        first, last = firsts[number], min(firsts[number + 1], until + SKEW_S)
        line.add(attempt.start_time, TimeUse.QUEUE)
        # Slurm's times are whole seconds by the controller's clock. By that of the nodes, the
        # program may end a moment after the attempt, and has then also started a moment later.
        ended = until if own is None or own.ended is None else own.ended
        line.offset = min(max(0.0, ended - until), SKEW_S)
        part = _Attempt(
            attempt.start_time + line.offset,
            until + line.offset,
            own,
            [each for each in evidence.records if first <= each.time < last],
            [each for each in evidence.lost if first <= each.end < last],
            max((time for time in evidence.samples if first <= time < last), default=0.0),
        )
        reached = max(reached, part.divide(line, reached))
        line.offset = 0.0
    line.add(end, TimeUse.QUEUE)
    return {use: seconds for use in TimeUse if (seconds := line.seconds[use]) > 0}


def _suspended(attempt: AttemptRecord, end: float, evidence: TimeEvidence) -> list[_Span]:
    """Return the times in which an attempt was suspended. Slurm tells only how long that was
    together, so these are its longest times without metrics and telemetry.
    """
    left = float(attempt.suspended_s)
    until = end if attempt.end_time is None else attempt.end_time
    times = [record.time for record in evidence.records] + [*evidence.samples] if left else []
    seen = sorted(time for time in times if attempt.start_time < time < until)
    gaps = [*pairwise([attempt.start_time, *seen, until])] if left else []
    spans: list[_Span] = []
    for a, b in sorted(gaps, key=lambda gap: gap[0] - gap[1]):
        if left > 0:
            spans.append((max(a, b - left), b))
            left -= b - a
    return sorted(spans)


class _Line:
    """Time from ``cursor`` on, whose parts are added in order. staged, hangs, idle, suspended: times
    in order.

    offset: seconds by which the clock of ``now``, hangs and idle times is ahead of the line's.
    """

    def __init__(
        self,
        cursor: float,
        staged: Sequence[_Span],
        hangs: Sequence[_Span],
        idle: Sequence[_Span],
        suspended: Sequence[_Span] = (),
    ) -> None:
        self.cursor = float(cursor)
        self.offset = 0.0
        self.seconds: dict[TimeUse, float] = defaultdict(float)
        self._staged = staged
        self._hangs = hangs
        self._idle = idle
        self._suspended = suspended

    @property
    def now(self) -> float:
        return self.cursor + self.offset

    def add(self, until: float, use: TimeUse) -> float:
        """Add the time until then. Return the seconds of it that ``use`` alone has, so that were
        neither staging nor hung nor idle.

        Time before the last call's does not count again.
        """
        begin, end = self.now, max(self.now, until)
        self.cursor = end - self.offset
        left = end - begin
        kinds = [
            (TimeUse.SUSPENDED, self._suspended),
            (TimeUse.STAGING, self._staged),
            (TimeUse.HUNG, self._hangs),
        ]
        kinds += [(TimeUse.IDLE, self._idle)] if use in _MAY_BE_IDLE else []
        seen: list[_Span] = []
        for kind, spans in kinds if use not in {TimeUse.QUEUE, TimeUse.EXIT} else ():
            if spans and left:
                before_s = sum(b - a for a, b in seen)
                seen = _merged([*seen, *_overlaps(spans, begin, end)])
                seconds = sum(b - a for a, b in seen) - before_s
                self.seconds[kind] += seconds
                left = max(0.0, left - seconds)
        self.seconds[use] += left
        return left

    def move(self, seconds: float, use: TimeUse) -> None:
        """Count so many seconds, which were added as ``RUNNING``, as another use."""
        self.seconds[TimeUse.RUNNING] -= seconds
        self.seconds[use] += seconds


@dataclass(slots=True)
class _Attempt:
    """An attempt, with what was recorded in it.

    own: the attempt in the job's own record. None: it is not there. sampled: time of the last
        telemetry, or 0.
    """

    begin: float
    end: float
    own: Attempt | None
    records: Sequence[_Record]
    lost: Sequence[_Lost]
    sampled: float
    # Seconds between steps for which no record tells the use, and seconds of checkpoints.
    _between: float = field(default=0.0, init=False)
    _stalls: float = field(default=0.0, init=False)

    def divide(self, line: _Line, reached: float) -> float:
        """Add this attempt to the line. reached: the last step of earlier attempts. Return its
        own.
        """
        # 0: unknown.
        last = float((self.own and self.own.progress[1]) or -math.inf)
        parts: list[_Record | _Lost] = [*self.records, *self.lost]
        # Of two records at the same time, the one that the program wrote first comes first.
        parts.sort(key=lambda part: part.end if isinstance(part, _Lost) else part.time)
        if parts:
            self._start(line, parts)
        step: float | None = None
        for part in parts:
            if isinstance(part, _Lost):
                self._add_lost(line, part)
                last = max(last, part.step)
                continue
            self._add(line, part, step, reached)
            step = step if part.step is None else part.step
            last = last if step is None else max(last, step)
        checkpoints = min(self._between, self._stalls)
        line.move(checkpoints, TimeUse.CHECKPOINT)
        self._finish(line)
        return last

    def _start(self, line: _Line, parts: Sequence[_Record | _Lost]) -> None:
        """Add the time until the first step or, if that is unknown, until its record."""
        first = parts[0]
        started = self.own.started if self.own else None
        program = self.begin if started is None else started
        if isinstance(first, _Lost):
            begin: float | None = first.begin
        elif first.seconds is not None:
            begin = first.time - first.seconds
        else:
            # The first step took about as long as the second.
            times = (part.time for part in parts if isinstance(part, _Record))
            second = next((time for time in times if time > first.time), math.inf)
            begin = 2 * first.time - second if 2 * first.time - second >= program else None
        line.add(min(program if begin is None else max(begin, program), self.end), TimeUse.START_UP)
        if begin is None and isinstance(first, _Record):
            line.add(min(first.time, self.end), TimeUse.RUNNING)

    def _add(self, line: _Line, record: _Record, before: float | None, reached: float) -> None:
        """Add the time until a record. before: the step of the record before it."""
        until = min(record.time, self.end)
        self._stalls += record.stall_s
        if record.seconds is not None:
            self._between += line.add(until - record.seconds, TimeUse.RUNNING)
        if record.kind == "evaluation":
            is_of_it = record.seconds is not None or record.step == before
            line.add(until, TimeUse.EVALUATION if is_of_it else TimeUse.RUNNING)
        elif record.kind == "checkpoint":
            # Training may continue while a checkpoint is written.
            self._between += line.add(until, TimeUse.RUNNING)
        elif record.step is None or (before is not None and record.step <= before):
            line.add(until, TimeUse.RUNNING)
        else:
            line.add(min(until, line.now + record.data_s), TimeUse.DATA)
            again = 1.0 if before is None else (reached - before) / (record.step - before)
            share = float(record.step <= reached) if before is None else min(1.0, max(0.0, again))
            line.add(line.now + share * max(0.0, until - line.now), TimeUse.REDONE)
            line.add(until, TimeUse.USEFUL)

    def _add_lost(self, line: _Line, lost: _Lost) -> None:
        """Add the time of records that a later attempt has removed."""
        line.add(min(lost.begin, self.end), TimeUse.RUNNING)
        for use, seconds in lost.uses:
            line.add(min(line.now + seconds, lost.end, self.end), use)
        line.add(min(lost.end, self.end), TimeUse.RUNNING)

    def _finish(self, line: _Line) -> None:
        """Add the time after the last record."""
        own = self.own
        is_final = any(record.kind == "result" for record in self.records)
        if own is not None:
            line.add(min(own.started or self.begin, self.end), TimeUse.START_UP)
            ended = max(own.last or 0.0, self.sampled) if own.ended is None else own.ended
            line.add(min(ended, self.end), TimeUse.EXIT if is_final else TimeUse.RUNNING)
        is_over = is_final or (own is not None and own.ended is not None)
        line.add(self.end, TimeUse.EXIT if is_over else TimeUse.UNKNOWN)


class Records:
    """The records of the metrics of a job or task; none if there are very many."""

    def __init__(self) -> None:
        self._found: list[_Record | _Lost] = []

    def add(self, block: Block) -> None:
        room = max(0, _MOST_RECORDS + 1 - len(self._found))
        self._found += islice(_records_of(block), room)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences on what was not read."""
        is_full = len(self._found) > _MOST_RECORDS
        return (f"the use of time: more than {_MOST_RECORDS:,} lines of metrics",) * is_full

    def parts(self) -> tuple[list[_Record], list[_Lost]]:
        found = self._found if len(self._found) <= _MOST_RECORDS else []
        return (
            [record for record in found if isinstance(record, _Record)],
            [record for record in found if isinstance(record, _Lost)],
        )


def _records_of(block: Block) -> Iterator[_Record | _Lost]:
    times = block.place.times or ()
    steps = block.place.xs if block.axis in {STEP, EPOCH} else None
    lines: Sequence[Mapping[str, Any]] = block.lines or [{}] * len(times)
    for time, step, line in zip(times, steps or repeat(None), lines, strict=False):
        if time is None:
            continue
        if block.kind == "run":
            yield from _lost_in(line)
            continue
        seconds = _seconds(line, "seconds") if block.kind in {"iteration", "evaluation"} else None
        saved = {"checkpoint": "stall_s", "evaluation": "save_s"}.get(block.kind)
        stall_s = _seconds(line, saved) if saved else None
        data_s = (_seconds(line, "data_ms") or 0.0) / 1e3 if seconds is not None else 0.0
        yield _Record(
            time,
            block.kind,
            step,
            seconds,
            min(data_s, seconds or 0.0) if block.kind == "iteration" else 0.0,
            stall_s or 0.0,
        )


def _lost_in(line: Mapping[str, Any]) -> Iterator[_Lost]:
    lost = line.get("lost")
    if not isinstance(lost, dict):
        return
    begin, end = finite(lost.get("begin")), finite(lost.get("end"))
    if begin is None or end is None:
        return
    seconds, data_s, evaluation_s, stall_s = (
        _seconds(lost, key) or 0.0 for key in ("seconds", "data_s", "evaluation_s", "stall_s")
    )
    uses = (
        (TimeUse.DATA, min(data_s, seconds)),
        (TimeUse.USEFUL, max(0.0, seconds - data_s)),
        (TimeUse.EVALUATION, evaluation_s),
        (TimeUse.CHECKPOINT, stall_s),
    )
    yield _Lost(begin, end, _seconds(lost, "step") or 0.0, uses)


def _seconds(line: Mapping[str, Any], key: str) -> float | None:
    value = finite(line.get(key))
    return value if value is not None and value >= 0 else None


def _hang_times(hangs: Iterable[Hang], records: Sequence[_Record]) -> list[_Span]:
    """Return the times of hangs. Their ends are recorded up to a second late, so metrics tell them
    better.
    """
    times = [*sorted(record.time for record in records), math.inf]
    last = len(times) - 1
    return _merged(
        (hang.since, min(hang.until, times[bisect_right(times, hang.noticed, hi=last)]))
        for hang in hangs
    )


def _staged_times(events: Iterable[Mapping[str, Any]]) -> Iterator[_Span]:
    for event in events:
        since, until = finite(event.get("since")), finite(event.get("time"))
        if event.get("event") == "staged" and since is not None and until is not None:
            yield since, until


def _idle_times(folder: Path, nodes: Sequence[str], gpus: float) -> list[_Span]:
    """Return the times in which all nodes did nothing, by their telemetry."""
    common: list[_Span] | None = None
    for node in nodes:
        own = _merged(_idle_windows(folder, node, gpus))
        common = own if common is None else [*_common(common, own)]
        if not common:
            return []
    return [(begin, end) for begin, end in common or () if end - begin >= _SHORTEST_IDLE_S]


def _idle_windows(folder: Path, node: str, gpus: float) -> Iterator[_Span]:
    """Yield the times between two samples in which a node, with all of its own GPUs, did nothing."""
    for block in stored(NodeFile(folder, node)):
        if IDLE in block.columns:
            columns = (block.columns[name].ys for name in (BEFORE, IDLE, GPUS))
            for time, before, idle, seen in zip(block.place.ys, *columns, strict=True):
                if idle == 1 and seen >= gpus:
                    yield before, time


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """Return the times in order, and those that overlap or follow each other as one."""
    merged: list[_Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _common(spans: Sequence[_Span], others: Sequence[_Span]) -> Iterator[_Span]:
    for begin, end in others:
        yield from _overlaps(spans, begin, end)


def _overlaps(spans: Sequence[_Span], begin: float, end: float) -> Iterator[_Span]:
    """Yield the parts of ordered times between ``begin`` and ``end``."""
    at = max(0, bisect_right(spans, (begin, math.inf)) - 1)
    for a, b in islice(spans, at, None):
        if a >= end:
            return
        if b > begin:
            yield max(a, begin), min(b, end)
