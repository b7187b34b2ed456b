"""The history of a job: its attempts, read from its file job.events. Uses only the standard library
of Python 3.8 or newer.

A job records its starts, signals, hangs, alarms, causes, ends and requeues in this file
(payload/node/job.py). The job's program can write to it too, so every value may be wrong or
missing. Both clusterctl and the programs beside the job read the file by this module:
payload/node/history.py is a link to it.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

EVENTS_FILE = "job.events"
# EX_TEMPFAIL: the program has saved its work and asks to be requeued.
SAVED = 75
# A shell returns this number plus the signal that ended a program.
FROM_SHELL = 128
# A rank ends with 14 if it has lost another rank (PMIx), with 195 if it has lost slurmstepd, and
# with 143 if the launcher ends it.
LOST_PEER = 14
LOST_SERVER = 195
ENDED_BY_ANOTHER = (LOST_PEER, LOST_SERVER, SAVED, FROM_SHELL + signal.SIGTERM)
# Messages of Open MPI in the log of a rank that has lost another rank.
PEER_GONE = re.compile(
    "MPI communication peer process has unexpectedly disconnected|An error occurred in Socket "
    "closed"
)
# The code of the cause that job.py records if a node has lost the slurmstepd of its ranks.
LOST_SLURMSTEPD = "lost-slurmstepd"
# Slurm's states of nodes that are down, so that it ends their jobs, or do not answer.
DOWN = frozenset(("DOWN",))
LOST = frozenset(("DOWN", "NOT_RESPONDING"))
# The clocks of a node and of the controller may differ by this time.
SKEW_S = 2
# Slurm ends a job up to this time before the end that it has told the job.
EARLY_END_S = 5
# Slurm may send the signal before the time limit up to a minute early.
EARLY_SIGNAL_S = 65
DEFAULT_LEAD_S = 60

Event = Mapping[str, Any]
NOTHING: Event = MappingProxyType({})

_LONGEST = 500  # characters
_MOST_NODES = 8
_LATEST = 1 << 37  # Unix seconds
# States in which Slurm itself ends a job.
_BY_SLURM = frozenset("CANCELLED TIMEOUT PREEMPTED NODE_FAIL".split())
# The same as causes of a restart.
_TOLD = {
    "PREEMPTED": "preempted by a job of higher priority",
    "REQUEUED": "requeued by its user or an administrator",
    "TIMEOUT": "its time limit was reached",
    "NODE_FAIL": "a node of the job failed",
    "CANCELLED": "cancelled, and requeued by its user or an administrator",
}
_UNSEEN = "a node was lost, the job's processes were killed, or Slurm requeued the job"
_NEVER = "the job was cancelled before it started"
_NOT_AGAIN = "the job was requeued, and cancelled before it started again"
_NOT_FIRST = "another job of `submit --first` ran, or clusterctl chose no job in time"
_NO_END = "the job recorded no end: its processes were killed, or its node was lost"
# A restarted job appends to its logs (payload/node/task.py).
_RESTARTED = re.compile(r"^clusterctl: restart ([0-9]{1,6}) of this job$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^#SBATCH\s(.*)", re.MULTILINE)
_NOTICE = re.compile(r"(?:[BR]+:)?(?:SIG)?(\w+)(?:@(\d{1,9}))?", re.IGNORECASE)
# PMIx has lost the connection to a rank (PMIX_ERR_LOST_CONNECTION).
_LEFT_MPI = re.compile(
    r"mpi/pmix\S*: _errhandler: (?P<host>\S+) \[\d+\]: .*status = -61, source = "
    r"\[\S+:(?P<rank>\d{1,9})\]"
)
_TASKS = r"\d{1,9}(?:-\d{1,9})?"
_REPORTED = re.compile(rf"^srun: error: \S+: tasks? ({_TASKS}(?:,{_TASKS})*): ", re.MULTILINE)


class Hang(NamedTuple):
    """A time in which a job made no progress. Times are Unix seconds.

    summary: where the ranks were, such as ``rank 7 on n2 is at train.py:88``.
    since: time of the last progress. noticed: when hang.py recorded the hang.
    until: the next progress, the end of the program, or the last time at which the job is known to
        hang.
    ended_job: whether hang.py then ended the program. is_over: whether there was progress after it.
    """

    summary: str
    since: float
    noticed: float
    until: float
    ended_job: bool = False
    is_over: bool = False

    def __str__(self) -> str:
        """Return a line such as ``no progress for 1m30s: rank 7 on n2 is at train.py:88``."""
        return f"no progress for {self.duration}: {self.summary or 'ranks unknown'}"

    @property
    def duration(self) -> str:
        return duration(self.until - self.since)

    def as_dict(self) -> dict[str, Any]:
        """Return the hang as `-o json` shows it."""
        return {name: getattr(self, name) for name in self._fields[:-1]}


class Alarm(NamedTuple):
    """A time in which a job wasted its resources, such as idle GPUs. Times are Unix seconds.

    kind: see spec/alarms.py. summary: such as ``GPU 1 of n2 is idle: no process uses it``.
    since: since when. until: its end, the end of the program, or the last time at which it lasted.
    ended_job: whether alarms.py then ended the program. is_over: whether it ended before the
        program.
    """

    kind: str
    summary: str
    since: float
    until: float
    ended_job: bool = False
    is_over: bool = False

    def __str__(self) -> str:
        """Return a line such as ``GPU 1 of n2 is idle: no process uses it, for 31m``."""
        return f"{self.summary}, for {duration(self.until - self.since)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the alarm as `-o json` shows it."""
        return {name: getattr(self, name) for name in self._fields[:-1]}


class RecordedCause(NamedTuple):
    """A cause of a job's end, recorded by the program that knew it. text: that says it. task: the
    first task of a pack that failed.
    """

    text: str
    task: int


class Attempt(NamedTuple):
    """A time in which a job had its nodes: a start, and what was recorded until the next start.

    start: the event of the start. Empty: the job has recorded none. events: the later events.
    following: the start of the next attempt, which describes the loss of a node, because job.py on
        that node could not. Empty: this is the last attempt.
    order: how many attempts came before.
    slurm_state: Slurm's state of the attempt in its accounting, such as PREEMPTED. "": unknown.
    steps: time and step of records of metrics, in order of time.
    Times are Unix seconds.
    """

    start: Event = NOTHING
    events: Sequence[Event] = ()
    following: Event = NOTHING
    order: int = 0
    slurm_state: str = ""
    steps: Sequence[tuple[float, int]] = ()

    # --- The start ------------------------------------------------------------------------------
    @property
    def started(self) -> float | None:
        return _number(self.start, "time")

    @property
    def since(self) -> float | None:
        """When the attempt got its nodes by Slurm, before the checks that precede its program. If
        Slurm is too old to tell, ``started``.
        """
        told = _number(self.start, "since")
        return min(told, self.started or told) if told else self.started

    @property
    def number(self) -> int:
        """How often Slurm had restarted the job."""
        return int(_number(self.start, "restarts") or 0)

    @property
    def nodes(self) -> tuple[str, ...]:
        return _texts(self.start, "nodes")

    @property
    def job(self) -> str:
        """Slurm's id of the job or array task; "" without Slurm."""
        return _text(self.start, "job")

    @property
    def partition(self) -> str:
        return _text(self.start, "partition")

    @property
    def until(self) -> float:
        """When the time limit ends the attempt; infinite without a limit."""
        return _number(self.start, "until") or float("inf")

    # --- The end --------------------------------------------------------------------------------
    @property
    def requeue(self) -> Event:
        """The event with which job.py has requeued the job. Empty: it has not."""
        return self._last("requeue")

    @property
    def end(self) -> Event:
        """The event of the program's end, or else of the requeue. Empty: neither was recorded."""
        return self._last("end") or self.requeue

    @property
    def ended(self) -> float | None:
        """When the program ended; None: unknown."""
        return _number(self.end, "time")

    @property
    def last(self) -> float | None:
        """The time of the last event; None without events."""
        return max((event["time"] for event in (self.start, *self.events) if event), default=None)

    @property
    def status(self) -> int | None:
        """The exit status of the program; None: unknown."""
        status = _number(self.end, "status")
        return None if status is None else int(status)

    @property
    def how(self) -> str:
        """How the program ended: "exit", or the name of a signal. "": unknown, or a launcher's."""
        return _text(self._last("end"), "how")

    @property
    def stop(self) -> str:
        """Why job.py did not requeue the job, such as no-progress. "": it did not decide so."""
        return _text(self._last("stop"), "reason")

    @property
    def reason(self) -> str:
        """Why job.py requeued the job (saved, failed, hang), or "" if Slurm or a person did."""
        return _text(self.requeue, "reason")

    @property
    def signal(self) -> str:
        """The last signal that the job was sent, such as SIGUSR1. "": no signal."""
        return _text(self._last("signal"), "signal")

    @property
    def notice(self) -> str:
        """The signal that announced the time limit, such as SIGUSR1, or ""."""
        return next(
            (_text(each, "signal") for each in self.events if each.get("notice") is True), ""
        )

    @property
    def after_notice(self) -> str:
        """That the program ended after the signal that announced its time limit: ``ended 2s after
        SIGUSR1, which announced its time limit (--signal)``. "": it did not, or is known to have ignored
        the signal.
        """
        notices = (each for each in self.events if each.get("notice") is True)
        told = next((each for each in notices if each.get("ignored") is not True), NOTHING)
        if not told or self.ended is None:
            return ""
        after = duration(self.ended - told["time"])
        name = _text(told, "signal")
        return f"ended {after} after {name}, which announced its time limit (--signal)"

    @property
    def term(self) -> Event:
        """The last SIGTERM, with Slurm's state of the job. Empty: no SIGTERM."""
        terms = (each for each in reversed(self.events) if each.get("signal") == "SIGTERM")
        return next(terms, NOTHING)

    @property
    def causes(self) -> Mapping[str, RecordedCause]:
        """The causes of the end, by their codes."""
        return {
            _text(each, "code"): RecordedCause(_text(each, "text"), int(_number(each, "task") or 0))
            for each in self.events
            if each.get("event") == "cause"
        }

    @property
    def killed_at(self) -> float:
        """When job.py killed the remaining ranks. Infinite: never."""
        kills = (each["time"] for each in self.events if each.get("signal") == "SIGKILL")
        return min(kills, default=float("inf"))

    @property
    def interrupted(self) -> Event:
        """The event with which a bundled training has recorded that a signal stopped it: its
        ``iteration``, and whether it ``continues`` from a checkpoint. Empty: it did not.
        """
        return self._last("interrupted")

    @property
    def saved_iteration(self) -> int:
        """The iteration of the checkpoint with which an interrupted training can continue. 0: none."""
        event = self.interrupted
        return int(_number(event, "iteration") or 0) if event.get("continues") is True else 0

    @property
    def is_open(self) -> bool:
        """Whether job.py has recorded the start, but neither the end nor SIGTERM, by which Slurm
        ends jobs.
        """
        return bool(self.start) and not (self.end or self.stop or self.term)

    # --- What job.py found out about the end ---------------------------------------------------------
    @property
    def failure(self) -> Event:
        """The event that describes the end: if a node was lost, the next start."""
        own = (self.requeue, self._last("stop"))
        return next((event for event in own if "kind" in event), self.following)

    @property
    def kind(self) -> str:
        """The same text for similar ends, such as SIGKILL, exit code 1, hang, saved, or loss of n2."""
        return _text(self.failure, "kind")

    @property
    def error(self) -> str:
        """The program's exception and its place. "": unknown."""
        return _text(self.failure, "error")

    @property
    def place(self) -> str:
        """The first rank that failed, such as rank 1 on n2. "": unknown."""
        return _text(self.failure, "place")

    @property
    def suspects(self) -> tuple[str, ...]:
        """The nodes that may have caused the failure."""
        return _texts(self.failure, "suspects")

    @property
    def progress(self) -> tuple[int, int, int]:
        """The number of the last checkpoint, the last step, and the time of the last checkpoint
        that has no number. 0: unknown.
        """
        values = [*_list(self.failure, "progress"), 0, 0, 0]
        number, step, written = (int(_number({"n": value}, "n") or 0) for value in values[:3])
        return number, step, written

    @property
    def said(self) -> str:
        """How the attempt failed, such as ``SIGKILL in rank 1 on n2``. "": job.py found no failure.

        An exit code like that of a signal may be the program's own.
        """
        code = _number(self.failure, "code")
        how = f"exit code {int(code)}" if code else self.kind.replace(",", ", ")
        return " in ".join(filter(None, (self.error or how, self.place))) if self.kind else ""

    @property
    def facts(self) -> str:
        """The attempt in a line, beside the lines of other attempts: ``attempt 2: 1m3s on n1, n2;
        SIGKILL in rank 1 on n2; step 62``.
        """
        end = self.ended or (self.again if self.following else self.last) or 0
        on = f" on {', '.join(self.nodes[:_MOST_NODES])}" if self.nodes else ""
        number, step, _ = self.progress
        reached = [f"{name} {n}" for name, n in (("checkpoint", number), ("step", step)) if n]
        ran = f"attempt {self.order + 1}: {duration(end - (self.started or end))}{on}"
        return "; ".join(filter(None, (ran, self.cause, ", ".join(reached))))

    # --- Hangs and alarms -------------------------------------------------------------------------
    @property
    def hangs(self) -> tuple[Hang, ...]:
        return tuple(_hangs(self.events))

    @property
    def hang(self) -> Hang | None:
        """The hang that lasts, or lasted until the end. None: no such hang."""
        lasting = [hang for hang in self.hangs if not hang.is_over]
        return lasting[-1] if lasting else None

    @property
    def all_alarms(self) -> tuple[Alarm, ...]:
        return tuple(_alarms(self.events))

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms that last, or lasted until the end, at most one of each kind."""
        return tuple(alarm for alarm in self.all_alarms if not alarm.is_over)

    # --- The state of the job ---------------------------------------------------------------------
    @property
    def state(self) -> str:
        """Slurm's state of a job whose last attempt this is, and that Slurm's queue has forgotten,
        such as COMPLETED or TIMEOUT.
        """
        by_slurm = self._state_by_slurm
        if by_slurm in _BY_SLURM:
            return by_slurm
        if self.why_not_run:
            return "CANCELLED"
        return "COMPLETED" if self.status == 0 else "FAILED"

    @property
    def state_reason(self) -> str:
        """A remark on ``state``, or ""."""
        return self.why_not_run or ("" if self.is_recorded else _NO_END)

    @property
    def why_not_run(self) -> str:
        """Why the job did not run, or not again, or ""."""
        if not self.has_begun:
            return _NEVER
        if self.events and self.events[-1].get("event") == "not-first":
            return _NOT_FIRST
        return _NOT_AGAIN if self.is_requeued else ""

    @property
    def is_requeued(self) -> bool:
        """Whether job.py or Slurm has requeued the job. If Slurm has refused that to job.py, the
        end is recorded once more.
        """
        by_slurm = self._state_by_slurm
        last = self._last("end", "requeue").get("event")
        return by_slurm == "REQUEUED" or (last == "requeue" and not by_slurm)

    @property
    def has_begun(self) -> bool:
        """Whether the job has recorded anything."""
        return bool(self.start or self.events)

    @property
    def has_ended(self) -> bool:
        """Whether the attempt has begun, and has recorded its end."""
        return self.has_begun and self.is_recorded

    @property
    def is_recorded(self) -> bool:
        """Whether the events tell the end. Otherwise the job was killed, or its node was lost."""
        return bool(self.why_not_run or self._state_by_slurm or self.end)

    @property
    def exit_code(self) -> int | None:
        """The exit code of a job that ended by itself; None: unknown."""
        return None if self.why_not_run or self._state_by_slurm else self.status

    @property
    def left(self) -> float | None:
        """When the job ended by ``state``, as far as that was recorded."""
        return self.last if self.exit_code is None else self.ended

    @property
    def _state_by_slurm(self) -> str:
        """The state in which Slurm has ended the attempt, REQUEUED if it has requeued the job,
        else "".
        """
        told = self.term
        state = _text(told, "state") if told else "RUNNING"
        if not state:
            return "TIMEOUT" if told["time"] >= self.until - EARLY_END_S else "CANCELLED"
        return state if state in (*_BY_SLURM, "REQUEUED") else ""

    # --- The restart after it -----------------------------------------------------------------------
    @property
    def restart(self) -> int:
        """The number of the restart. It is counted here if Slurm has not, because a power cut took
        slurmctld's record of it.
        """
        return int(_number(self.following, "restarts") or self.order + 1)

    @property
    def again(self) -> float:
        """The start of the next attempt."""
        return float(self.following["time"])

    @property
    def again_s(self) -> float | None:
        """Seconds from the end to the first record of the next attempt. If the end is unknown, from
        the last earlier record that the next attempt has kept. None: unknown.
        """
        at = bisect_left(self.steps, (self.again, 0))
        since = self.ended or (self.steps[at - 1][0] if at else None)
        if at == len(self.steps) or since is None:
            return None
        return round(self.steps[at][0] - since, 3)

    @property
    def steps_lost(self) -> int | None:
        """Steps that the next attempt repeated; None: unknown."""
        at = bisect_left(self.steps, (self.again, 0))
        reached = self.progress[1]
        return max(0, reached - self.steps[at][1] + 1) if reached and at < len(self.steps) else None

    @property
    def noticed_s(self) -> int | None:
        """Seconds from the last progress of a hung program to its end. None: it was not ended."""
        hang = self._ending_hang
        return int(hang.noticed - hang.since) if hang else None

    @property
    def _ending_hang(self) -> Hang | None:
        return next((hang for hang in self.hangs if hang.ended_job), None)

    @property
    def cause(self) -> str:
        """Why the attempt ended, by what it recorded, and only without such a record by Slurm's
        state.
        """
        if self._ending_hang:
            return f"no progress: {self._ending_hang.summary or 'ranks unknown'}"
        is_saved = self.status == SAVED or self.reason == "saved"
        # job.py of the next attempt knows more about a lost node.
        is_told = not (self.failure is self.following and self.kind)
        told = _text(self.term, "state") if is_told else ""
        if told in _TOLD:
            saved = "; the program saved its work" if is_saved else ""
            if told == "TIMEOUT" and self.notice and not is_saved:
                saved = f"; the program did not save its work after the notice ({self.notice})"
            return _TOLD[told] + saved
        if self.reason == "saved" and self.kind in ("", "saved"):
            return "the program saved its work"
        if self.notice and self.kind == self.notice:
            subject = f"{self.place} does" if self.place else "the program does"
            return f"its time limit was near; {subject} not handle the notice ({self.notice})"
        if self.kind:
            return self.said
        if self.status is not None:
            is_done = self.status == 0
            done = "the job had completed, and was requeued"
            return done if is_done else f"exit status {self.status}"
        return self._unrecorded_cause

    @property
    def drained(self) -> Mapping[str, str]:
        """Node -> reason, for nodes of the attempt that were drained before the next attempt."""
        found = self.following.get("drained")
        reasons = found if isinstance(found, dict) else {}
        return {node: _text(reasons, node) for node in self.nodes if _text(reasons, node)}

    @property
    def _unrecorded_cause(self) -> str:
        on = f" on {', '.join(self.nodes[:_MOST_NODES])}" if self.nodes else ""
        if self.slurm_state == "REQUEUED":
            # Slurm also requeues a job by itself, such as after a failed Prolog.
            before = " before its program started" if "unrecorded" in self.start else ""
            if before and self.drained:
                drained = "; ".join(
                    f"{node} was drained: {why}" for node, why in self.drained.items()
                )
                return f"requeued{on}{before}; {drained}"
            return f"requeued by Slurm, its user or an administrator{on}{before}"
        return _TOLD.get(self.slurm_state) or f"no end was recorded{on}: {_UNSEEN}"

    def __str__(self) -> str:
        """Return the restart as a line such as ``restart 1 at 12:03:05: SIGKILL in rank 1 on n2;
        started after 9s``.

        The time is this host's.
        """
        return self._line(time.strftime("%H:%M:%S", time.localtime(self.ended or self.again)))

    @property
    def in_utc(self) -> str:
        """The line for documents, which other people also read: its time is in UTC, and says so."""
        return self._line(time.strftime("%H:%M:%S UTC", time.gmtime(self.ended or self.again)))

    def _line(self, at: str) -> str:
        spans = {
            "noticed after": self.noticed_s,
            "started after": None if self.ended is None else self.again - self.ended,
            "training again after": self.again_s,
        }
        words = [f"{key} {duration(s)}" for key, s in spans.items() if s is not None]
        if self.steps_lost is not None:
            words.append(f"{self.steps_lost} steps lost")
        return f"restart {self.restart} at {at}: {'; '.join([self.cause, *words])}"

    def as_dict(self) -> dict[str, Any]:
        """Return the restart as `-o json` and run.json show it."""
        return {
            "number": self.restart,
            "cause": self.cause,
            "reason": self.reason,
            "status": self.status,
            "nodes": [*self.nodes],
            "ended": self.ended,
            "started": self.again,
            "noticed_s": self.noticed_s,
            "again_s": self.again_s,
            "steps_lost": self.steps_lost,
        }

    def _last(self, *names: str) -> Event:
        return next((each for each in reversed(self.events) if each.get("event") in names), NOTHING)


def events_of(text: str) -> tuple[Event, ...]:
    """Return the valid events in the text of job.events, in order."""
    events = []
    for line in text.splitlines():
        # A node may have died while it wrote a line.
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                at = _number(event, "time")
                events += [] if at is None else [{**event, "time": at}]
    return tuple(events)


def attempts_of(text: str | Iterable[Event]) -> tuple[Attempt, ...]:
    """Return the attempts of a job, from the text of job.events or its events. There is at least
    one; without a start it has all events.
    """
    events = events_of(text) if isinstance(text, str) else tuple(text)
    starts = [at for at, event in enumerate(events) if event["event"] == "start"]
    if not starts:
        return (Attempt(events=events),)
    return tuple(
        Attempt(
            start=events[at],
            events=events[at + 1 : after],
            following=NOTHING if after is None else events[after],
            order=order,
        )
        for order, (at, after) in enumerate(zip(starts, [*starts[1:], None]))
    )


def of_chain(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the attempts since the submission, or since a person restarted a stopped job."""
    first = max((at for at, each in enumerate(attempts) if not each.number), default=0)
    stopped = max((at + 1 for at, each in enumerate(attempts) if each.stop), default=0)
    return [each for each in attempts[max(first, stopped) :] if each.start]


def nodes_of(attempts: Iterable[Attempt]) -> list[str]:
    """Return the nodes of all attempts."""
    return [*dict.fromkeys(node for attempt in attempts for node in attempt.nodes)]


def duration(seconds: float) -> str:
    """Return a time such as ``1h30m``."""
    left = max(0, round(seconds))
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


# --- Rules about logs and scripts -------------------------------------------------------------------
def this_attempt(log: str) -> str:
    """Return the part of a log since the job's last restart."""
    return _RESTARTED.split(log)[-1]


def restart_in(log: str) -> int | None:
    """Return the number of the last restart that a log notes. None: no restart is noted."""
    notes = _RESTARTED.findall(log)
    return int(notes[-1]) if notes else None


def is_notice(script: str, name: str, left_s: float) -> bool:
    """Return whether Slurm sends a signal because the job's time limit is near (#SBATCH --signal).

    script: of the job. name: of the signal, such as SIGUSR1. left_s: until the time limit.
    """
    asked = [*_notices(script)]
    # sbatch uses the last option.
    return bool(asked) and asked[-1][0] == name and left_s <= asked[-1][1] + EARLY_SIGNAL_S


def _notices(script: str) -> Iterator[tuple[str, int]]:
    """Yield the signal and the seconds before the time limit of each option --signal of a script."""
    for line in _DIRECTIVE.findall(script):
        words: list[str] = []
        # sbatch ignores a quote without an end.
        with suppress(ValueError):
            words = shlex.split(line, comments=True)
        for word, after in zip(words, [*words[1:], ""]):
            option, sign, value = word.partition("=")
            match = _NOTICE.fullmatch(value if sign else after)
            if option == "--signal" and match:
                with suppress(ValueError):
                    number = match[1].upper()
                    name = signal.Signals(int(number)).name if number.isdigit() else f"SIG{number}"
                    yield name, int(match[2] or DEFAULT_LEAD_S)


def left_mpi(log: str, ended: Container[int]) -> tuple[int, str] | None:
    """Return rank and node of a rank that has ended without MPI_Finalize and without failure, so
    that its exit code was 0. Slurm then ends the other ranks.

    log: the job's own. A rank that fails is reported there by srun. ended: the ranks that have
    recorded their failure.
    """
    log = this_attempt(log)
    lost = _LEFT_MPI.search(log)
    if not lost:
        return None
    rank = int(lost["rank"])
    is_reported = _is_in(rank, ",".join(_REPORTED.findall(log)))
    return None if is_reported or rank in ended else (rank, lost["host"])


class RankEnd(NamedTuple):
    """The recorded end of a rank. code: its exit code, or -N if signal N ended it."""

    time: float
    rank: int
    code: int
    host: str

    @property
    def is_by_another(self) -> bool:
        """Whether a rank ends so if another one has ended, or if it has saved its work."""
        in_a_shell = self.code if self.code >= 0 else FROM_SHELL - self.code
        return in_a_shell in ENDED_BY_ANOTHER


def rank_ends(records: Mapping[int, str], before: float = float("inf")) -> list[RankEnd]:
    """Return the valid ends in rank -> "TIME CODE HOST", as task.py writes them, in order of time.

    before: when job.py began to kill ranks. Later ends do not count.
    """
    ends = []
    for rank, record in records.items():
        with suppress(ValueError):
            when, code, host = record.split()
            ends.append(RankEnd(float(when), rank, int(code), host))
    return sorted(end for end in ends if end.time < before)


def first_end(ends: Iterable[RankEnd], log_of: Callable[[int], str]) -> RankEnd | None:
    """Return the first rank that ended by itself, else the first that does not report the loss of
    another rank, or None. ends: in order of time.

    log_of: called with ranks; returns a rank's log of this attempt.
    """
    in_order = sorted(ends, key=lambda end: end.is_by_another)
    return next((end for end in in_order if not PEER_GONE.search(log_of(end.rank))), None)


def _is_in(number: int, ranges: str) -> bool:
    """Return whether a number is in a list such as 0-2,5."""
    limits = [part.partition("-") for part in ranges.split(",") if part]
    return any(int(low) <= number <= int(high or low) for low, _, high in limits)


# --- Parts of events ----------------------------------------------------------------------------------
def _hangs(events: Sequence[Event]) -> Iterator[Hang]:
    for number, event in enumerate(events):
        if event["event"] != "hang":
            continue
        kinds = ("progress", "end")
        after = next((each for each in events[number + 1 :] if each["event"] in kinds), NOTHING)
        seconds = min(_number(event, "seconds") or 0.0, event["time"])
        # hang.py notices progress a moment later.
        age_s = min(max(0.0, _number(after, "age") or 0.0), SKEW_S)
        yield Hang(
            summary=_text(event, "summary"),
            since=event["time"] - seconds,
            noticed=event["time"],
            until=max(event["time"], (_number(after, "time") or 0) - age_s),
            ended_job=event.get("action") != "warn",
            is_over=after.get("event") == "progress",
        )


def _alarms(events: Sequence[Event]) -> Iterator[Alarm]:
    for at, event in enumerate(events):
        if event["event"] != "alarm":
            continue
        kind = _text(event, "kind")
        after = next((each for each in events[at + 1 :] if _ends_alarm(each, kind)), NOTHING)
        # An alarm that names more later is the same alarm.
        if after.get("event") == "alarm":
            continue
        is_over = after.get("event") == "alarm-over"
        # The end of an alarm is recorded some time after its condition last held.
        waited_s = (_number(after, "seconds") or 0) if is_over else 0
        yield Alarm(
            kind=kind,
            summary=_text(event, "summary"),
            since=event["time"] - (_number(event, "seconds") or 0),
            until=max(event["time"], (_number(after, "time") or 0) - waited_s),
            ended_job=event.get("action") == "end",
            is_over=is_over,
        )


def _ends_alarm(event: Event, kind: str) -> bool:
    is_same = event["event"] in ("alarm", "alarm-over") and _text(event, "kind") == kind
    return is_same or event["event"] == "end"


def _text(event: Event, key: str) -> str:
    value = event.get(key)
    return "".join(filter(str.isprintable, value))[:_LONGEST] if isinstance(value, str) else ""


def _texts(event: Event, key: str) -> tuple[str, ...]:
    return tuple(filter(None, (_text({"item": item}, "item") for item in _list(event, key))))


def _list(event: Event, key: str) -> Sequence[Any]:
    value = event.get(key)
    return value if isinstance(value, list) else ()


def _number(event: Event, key: str) -> float | None:
    value: Any = event.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and 0 <= value < _LATEST else None
