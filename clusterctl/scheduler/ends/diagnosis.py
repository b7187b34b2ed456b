"""Why a job or a task ended as it did, or why it waits: a value that is judged once (judge.py), kept in the
job's folder, and shown by every command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import starmap
from typing import Any, Final

from clusterctl.errors import Notice
from clusterctl.scheduler.base import plain
from clusterctl.scheduler.ends.log_text import short
from clusterctl.spec.names import first_few
from clusterctl.util.typed_json import from_json

_MOST_NAMED: Final = 8
_MOST_CAUSES: Final = 12
# Codes of ends of which nobody has stated a cause.
_BARE: Final = frozenset({"exit-code", "signal", "unknown"})


def show_log(job_id: str) -> str:
    """Return the command that shows a job's log."""
    return f"`clusterctl logs {job_id}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A hint. line: the explained line, with which the log ends; "": the hint explains the signal,
    the exit code or the script.

    says: the meaning of the line: always, if ``is_certain`` (because this machine, Slurm or the
        line itself says so), and otherwise usually. fix: the remedy to try.
    """

    name: str
    says: str
    fix: str
    line: str = ""
    is_certain: bool = False

    def told(self, fix: str) -> str:
        """Return the hint in words. fix: that of the diagnosis, which is not repeated."""
        meaning = f"hint: {'' if self.is_certain else 'usually '}{self.says}"
        return meaning if self.fix == fix else f"{meaning}; try: {self.fix}"


@dataclass(frozen=True, slots=True)
class Note:
    """What may be wrong with a job that completed. code: its name, which never changes."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFacts:
    """Facts about a job that ended. None or empty: unknown, or none.

    elapsed_s: of the last attempt. memory_peak: the largest memory of a task that Slurm measured.
        memory_limit: of the job on each node. Both in bytes.
    lost: node that stopped answering -> reason. unfit: node that could not start the job -> reason.
    cancelled_by: the user who cancelled the job.
    not_restarted: why Slurm did not restart it. hang, alarms: as they were recorded beside the job.
    """

    elapsed_s: int | None = None
    time_limit_s: int | None = None
    memory_peak: int | None = None
    memory_limit: int | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    cancelled_by: str = ""
    not_restarted: str = ""
    hang: str = ""
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a job or a task ended as it did or waits, as far as it is known.

    state, reason: Slurm's. code: of the cause that Slurm, the kernel or job.py states; otherwise
        python-exception, signal, exit-code or unknown; "completed" of a job that completed.
    cause: in words, with rank and host; "" of a job that completed. fix: what to do next.
    rank, host: of the rank that failed first. exit_code, signal: its end; exit_code also 128 + N
        beside the signal N if the job itself ended with that.
    remarks: other facts that may explain the end. hints: what known messages mean.
    lines: of the log of ``source``, such as ``rank 1 on n2`` ("": the job). note: why there are none.
    last_line: the last of them that is a statement, of stderr if there is one, and does not say itself
        that it is no error. It may not say why.
    notes: what may be wrong with a job that completed.
    """

    job_id: str
    name: str = ""
    state: str = ""
    reason: str = ""
    code: str = "unknown"
    cause: str = ""
    fix: str = ""
    rank: int | None = None
    host: str = ""
    exit_code: int | None = None
    signal: str = ""
    remarks: tuple[str, ...] = ()
    hints: tuple[Hint, ...] = ()
    source: str = ""
    lines: tuple[str, ...] = ()
    last_line: str = ""
    note: str = ""
    notes: tuple[Note, ...] = ()
    facts: EndFacts = field(default_factory=EndFacts)

    @classmethod
    def read(cls, value: object) -> Diagnosis | None:
        """Return the diagnosis in a file that a job may have damaged. None: there is none."""
        try:
            return from_json(cls, value)
        except ValueError:
            return None

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as `-o json`, run.json and the job's folder have it."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    @property
    def told_of_task(self) -> str:
        """The cause in a table of tasks: with the last line of the log, if nothing else is known."""
        is_bare = self.code in _BARE and self.last_line
        return f"{self.cause} | {short(self.last_line)}" if is_bare else self.cause

    @property
    def told_anywhere(self) -> str:
        """The same without the host, so that what is equal on several hosts is told once."""
        told = self.told_of_task
        return told.replace(f" on {self.host}", "", 1) if self.host else told

    @property
    def quoted(self) -> Iterator[str]:
        """The lines of the log as they are shown, or a note in their place."""
        if self.lines:
            yield from (f"({self.source}:)",) if self.source else ()
            yield from self.lines
        elif self.note:
            yield f"({self.note})"

    @property
    def explanations(self) -> Iterator[str]:
        """Other facts that may explain the end, and the hints."""
        yield from self.remarks
        yield from (hint.told(self.fix) for hint in self.hints)


def by_cause(found: Iterable[Diagnosis]) -> Iterator[tuple[Diagnosis, list[str]]]:
    """Yield the first diagnosis of each cause, and the IDs of all jobs with that cause, on whatever
    host.
    """
    groups: dict[tuple[str, str], list[Diagnosis]] = {}
    for each in found:
        notes = "".join(note.text.replace(each.job_id, "") for note in each.notes)
        groups.setdefault((each.state, each.told_anywhere + notes), []).append(each)
    for same in groups.values():
        yield same[0], [each.job_id for each in same]


def cause_column(found: Iterable[Diagnosis]) -> dict[str, str]:
    """Return the cause of each job for a column. A cause that an earlier job has is ``as ID``."""
    column: dict[str, str] = {}
    for first, job_ids in by_cause(each for each in found if each.cause):
        column |= dict.fromkeys(job_ids, f"as {first.job_id}")
        column[first.job_id] = first.told_of_task
    return column


def notices_of(found: Iterable[Diagnosis]) -> list[Notice]:
    """Return a note on each thing that may be wrong with jobs that completed; the same on several jobs is
    one note.
    """
    notices = []
    for first, (_, *others) in by_cause(each for each in found if each.notes):
        same = f" (likewise {first_few(others, _MOST_NAMED)})" if others else ""
        notices += [Notice(note.code, f"note: {note.text}{same}") for note in first.notes]
    return notices


def lines_of_tasks(states: Mapping[str, str], found: Iterable[Diagnosis]) -> list[str]:
    """Return the tasks that did not complete by their causes, a line each, and how many more causes
    there are. states: the states of tasks without a diagnosis, by their IDs.
    """
    of_state: dict[str, list[str]] = {}
    for job_id, state in states.items():
        of_state.setdefault(state, []).append(job_id)
    lines = [f"{first_few(ids, _MOST_NAMED)} {state}" for state, ids in of_state.items()]
    lines += starmap(told_of_tasks, by_cause(each for each in found if each.cause))
    more = len(lines) - _MOST_CAUSES
    return [*lines[:_MOST_CAUSES], *([f"and {more} more causes"] if more > 0 else [])]


def told_of_tasks(first: Diagnosis, job_ids: Sequence[str]) -> str:
    """Return a line with a cause and the tasks that have it. first: the diagnosis of the first."""
    told = first.told_anywhere if len(job_ids) > 1 else first.told_of_task
    return f"{first_few(job_ids, _MOST_NAMED)} {first.state}: {told}"
