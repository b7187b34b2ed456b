"""Parser of Slurm's output, and the commands that produce it.

A job's name, comment and folder may hold every byte but NUL, including newlines. So each field is
followed by a separator that is random for each command, and a record is a fixed number of fields. A
record that can't be parsed becomes a job or node with the error as its reason. Times are Unix
seconds. Each task of an array becomes a job.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from ClusterShell.RangeSet import RangeSet, RangeSetException

from clusterctl.errors import SlurmError
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, Outcome, StepInfo, own_exit
from clusterctl.scheduler.slurm.values import (
    as_exit_code,
    as_known_number,
    as_limit_s,
    as_number,
    as_seconds,
    as_signal,
    as_task,
    as_text,
    expand_nodes,
    is_number,
)
from clusterctl.state.attempts import AttemptRecord

ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

_Record = dict[str, str]
# Value of a job -> the field of the command's output that has it, and the conversion of its text.
_Values = Mapping[str, tuple[str, Callable[[str], object]]]


def _as_state(text: str) -> JobState:
    # The state may be "CANCELLED by 10000".
    return JobState(text.partition(" ")[0])


SQUEUE_VALUES: Final[_Values] = {
    "slurm_id": ("JobID", as_number),
    "number": ("ArrayJobID", as_number),
    "task": ("ArrayTaskID", as_task),
    "name": ("Name", str),
    "user": ("UserName", str),
    "partition": ("Partition", str),
    "account": ("Account", as_text),
    "qos": ("QOS", as_text),
    "state": ("State", _as_state),
    "reason": ("Reason", as_text),
    "exit_code": ("exit_code", as_exit_code),
    "signal": ("exit_code", as_signal),
    "nodes": ("NodeList", expand_nodes),
    "submit_time": ("SubmitTime", as_known_number),
    # Of a pending job, this is Slurm's estimate.
    "start_time": ("StartTime", as_known_number),
    # Of an active job, this is Slurm's estimate.
    "end_time": ("EndTime", as_known_number),
    "time_limit_s": ("TimeLimit", as_limit_s),
    # Of a pending job, these are the requested resources.
    "tres": ("tres-alloc", as_text),
    "expected_start": ("StartTime", as_known_number),
    "work_dir": ("WorkDir", str),
    "comment": ("Comment", as_text),
    "restarts": ("RestartCnt", as_number),
    # The time that the job has run, without that for which it was suspended: see ``_queued``.
    "ran_s": ("TimeUsed", as_seconds),
}
# sacct names and numbers tasks in another way: ``_accounted`` reads these values, and the requested
# resources.
SACCT_VALUES: Final[_Values] = {
    "name": ("JobName", str),
    "user": ("User", str),
    "partition": ("Partition", str),
    "account": ("Account", as_text),
    "qos": ("QOS", as_text),
    "state": ("State", _as_state),
    "reason": ("Reason", as_text),
    "exit_code": ("ExitCode", as_exit_code),
    "signal": ("ExitCode", as_signal),
    "nodes": ("NodeList", expand_nodes),
    "submit_time": ("Submit", as_known_number),
    "start_time": ("Start", as_known_number),
    "end_time": ("End", as_known_number),
    "time_limit_s": ("Timelimit", as_limit_s),
    "tres": ("AllocTRES", as_text),
    "expected_start": ("Start", as_known_number),
    "work_dir": ("WorkDir", str),
    "comment": ("Comment", as_text),
    "suspended_s": ("Suspended", as_seconds),
}
# If the text of one of these values is invalid, the job's state is UNKNOWN. If that of another is
# invalid, only this value is missing.
_REQUIRED: Final = frozenset({"number", "task", "state", "nodes"})
_OF_EXIT: Final = frozenset({"exit_code", "signal"})
_SACCT_ID = re.compile(r"(?P<job>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\]))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition of a cluster that other people operate, with the numbers of its nodes by state.

    max_time: the time limit as Slurm writes it. other: nodes that are down or drained, for example.
    allocated, idle, other: None: the site shows its users no nodes.
    """

    name: str
    is_default: bool
    is_up: bool
    max_time: str
    allocated: int | None
    idle: int | None
    other: int | None
    nodes: int

    @property
    def in_service(self) -> int | None:
        """The number of nodes on which Slurm starts jobs, now or when they are free. None: unknown."""
        return None if self.allocated is None or self.idle is None else self.allocated + self.idle

    @property
    def usable(self) -> bool:
        """Whether Slurm starts jobs in the partition, as far as is known."""
        return self.is_up and self.in_service != 0


_T = TypeVar("_T", JobInfo, NodeInfo, PartitionInfo)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Query(Generic[_T]):
    """A query: a command of Slurm, the fields to print, and the parser of the records."""

    argv: tuple[str, ...]
    fields: Sequence[str]
    read: Callable[[Iterator[_Record]], Iterable[_T]]

    def command(self, separator: str) -> list[str]:
        """Return the query's command line, which prints each field in full length and then the
        separator.
        """
        if self.argv[0] == "sacct":
            return [*self.argv, f"--delimiter={separator}", f"--format={','.join(self.fields)}"]
        return [*self.argv, "--Format=" + ",".join(f"{field}:{separator}" for field in self.fields)]

    def parse(self, text: str, separator: str) -> tuple[_T, ...]:
        """Parse the command's output into jobs or nodes. Raises SlurmError if that is
        impossible.
        """
        *values, remainder = text.split(separator)
        if remainder.strip() or len(values) % len(self.fields):
            raise _parse_error(self.argv[0], text)
        rows = (
            values[start : start + len(self.fields)]
            for start in range(0, len(values), len(self.fields))
        )
        # The previous record ended with a newline; ids and node names contain no newlines.
        records = ([first.rpartition("\n")[2], *remaining] for first, *remaining in rows)
        return tuple(self.read(dict(zip(self.fields, row, strict=True)) for row in records))


def new_separator() -> str:
    """Return a random separator. It begins with ``|``, because Slurm reads a leading digit as a
    width.
    """
    return f"|{os.urandom(8).hex()}|"


def parse_version(text: str) -> str:
    """Return ``22.05.8`` from ``slurm-wlm 22.05.8``. Raises SlurmError if the text has no
    version.
    """
    if match := re.search(r"\d+\.\d+\S*", text):
        return match.group()
    raise _parse_error("sinfo --version", text)


def _read(record: _Record, name: str, parse: Callable[[str], _V]) -> _V:
    """Convert a field of a record. Raises ValueError that names the field."""
    try:
        return parse(record[name])
    except ValueError as exc:
        raise ValueError(f"{name} {record[name][:100]!r}") from exc


def _queued(record: _Record) -> Iterator[JobInfo]:
    values = _values(record, SQUEUE_VALUES)
    ran_s = values.pop("ran_s", None)
    job = JobInfo(**values)
    until = job.end_time if job.ended else int(time.time())
    has_run = job.ended or job.state in {JobState.RUNNING, JobState.SUSPENDED}
    if has_run and None not in {job.start_time, until, ran_s}:
        lasted_s = (until or 0) - (job.start_time or 0)
        job = replace(job, suspended_s=max(0, lasted_s - ran_s))
    yield job


def _accounted(record: _Record) -> Iterator[JobInfo]:
    number, tasks = _accounted_id(record)
    values = _values(record, SACCT_VALUES)
    values["tres"] = values["tres"] or as_text(record["ReqTRES"])
    slurm_id = as_known_number(record["JobIDRaw"])
    for task in tasks:
        job = JobInfo(**values, number=number, task=task, slurm_id=slurm_id)
        # An attempt of a requeued job has ended, although the job has not.
        end = as_known_number(record["End"])
        yield replace(job, end_time=end) if job.state is JobState.REQUEUED else job


def _values(record: _Record, table: _Values) -> dict[str, Any]:
    """Return the values of a job that a record of squeue or sacct has. Raises ValueError if the text
    of a required value is invalid.
    """
    values: dict[str, Any] = {}
    for name, (field, parse) in table.items():
        try:
            values[name] = _read(record, field, parse)
        except ValueError:
            if name in _REQUIRED:
                raise
    state = values["state"]
    if values.keys() >= _OF_EXIT:
        own = own_exit(state, values["exit_code"], values["signal"])
        values["exit_code"], values["signal"] = own
    if state is JobState.TIMEOUT:
        # slurmctld has "TimeLimit", the accounting nothing.
        values["reason"] = ""
    return {name: value for name, value in values.items() if _is_meant(name, state)}


def _is_meant(name: str, state: JobState) -> bool:
    """Return whether Slurm means this value of a job in this state, and does not estimate it."""
    if name == "start_time":
        return state is not JobState.PENDING
    if name == "expected_start":
        return state is JobState.PENDING
    return name not in {*_OF_EXIT, "end_time"} or state.outcome is not Outcome.GOES_ON


def with_attempts(records: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
    """Return each job in sacct's records once, as it is now, with its attempts and the first
    submission.

    records: of each attempt, in order. Records of a job with another folder belong to a job that
        had the same id before Slurm's numbers began again.
    """
    jobs = {job.id: job for job in records}
    # The other parts of a heterogeneous job, such as 12+1, have IDs of their own.
    parts: dict[str, list[StepInfo]] = {}
    for job in jobs.values():
        leader, plus, _ = (job.steps or (StepInfo(""),))[0].id.partition("+")
        if plus and leader != job.id:
            parts.setdefault(leader, []).extend(job.steps or ())
    own: dict[str, list[JobInfo]] = {job_id: [] for job_id in jobs}
    for record in records:
        if record.work_dir == jobs[record.id].work_dir:
            own[record.id].append(record)
    return tuple(
        replace(
            job,
            submit_time=own[job_id][0].submit_time,
            steps=None if job.steps is None else (*job.steps, *parts.get(job_id, ())),
            # A job that was cancelled in the queue may have a start time, but it has no nodes.
            attempts=tuple(
                AttemptRecord(
                    start_time=each.start_time,
                    end_time=each.end_time,
                    nodes=each.nodes,
                    state=each.state.value if each.end_time is not None else "",
                    suspended_s=each.suspended_s,
                )
                for each in own[job_id]
                if each.start_time is not None and each.nodes
            ),
        )
        for job_id, job in jobs.items()
    )


def _accounted_id(record: _Record) -> tuple[int, Sequence[int | None]]:
    match = _SACCT_ID.fullmatch(record["JobID"])
    if match is None:
        # For example 12+1, a component of a heterogeneous job, which has a number of its own.
        return _read(record, "JobIDRaw", as_number), [None]
    if match["task"] or match["tasks"] is None:
        return int(match["job"]), [int(match["task"]) if match["task"] else None]
    try:
        # For example 0-8:2%4: from 0 to 8, each second, at most four at a time.
        tasks = RangeSet(match["tasks"].partition("%")[0].replace(":", "/"))
    except RangeSetException as exc:
        raise ValueError(f"JobID {record['JobID'][:100]!r}") from exc
    return int(match["job"]), [int(task) for task in tasks]


def _jobs(command: str, records: Iterator[_Record]) -> Iterator[JobInfo]:
    """Convert records. An invalid record becomes a job in state UNKNOWN."""
    table, convert, id_field = (
        (SQUEUE_VALUES, _queued, "ArrayJobID")
        if command == "squeue"
        else (SACCT_VALUES, _accounted, "JobID")
    )
    # The nodes of an invalid record are in use too, so its job gets them if possible.
    for record in records:
        try:
            yield from convert(record)
        except ValueError as exc:
            number = re.match(r"[0-9]{0,18}", record[id_field], re.ASCII)
            task = re.fullmatch(r"[0-9]{1,18}", record.get("ArrayTaskID", ""), re.ASCII)
            nodes: tuple[str, ...] = ()
            with suppress(ValueError):
                nodes = expand_nodes(record["NodeList"])
            yield JobInfo(
                number=int((number and number[0]) or 0),
                task=int(task[0]) if task else None,
                name=record[table["name"][0]],
                user=record[table["user"][0]],
                partition=record["Partition"],
                state=JobState.UNKNOWN,
                nodes=nodes,
                reason=_parse_message(command, exc),
                comment=as_text(record["Comment"]),
            )


def _parse_message(command: str, cause: ValueError) -> str:
    return f"clusterctl can't parse the output of {command}: {cause}"


_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def _jobs_with_steps(records: Iterator[_Record]) -> Iterator[JobInfo]:
    """Convert records of jobs, each of which is followed by those of its steps."""
    own: list[_Record] = []
    for record in records:
        # For example 12.batch or 12_3.0.
        if "." not in record["JobID"] and own:
            yield from _job_with_steps(own)
            own = []
        own.append(record)
    if own:
        yield from _job_with_steps(own)


def _job_with_steps(records: Sequence[_Record]) -> Iterator[JobInfo]:
    steps = tuple(map(_step, records))
    for job in _jobs("sacct", iter(records[:1])):
        yield replace(job, steps=steps)


def _step(record: _Record) -> StepInfo:
    size = re.fullmatch(r"([0-9.]+)([KMGT]?)", record["MaxRSS"])
    cancelled_by = re.fullmatch(r"CANCELLED by ([0-9]+)", record["State"])
    return StepInfo(
        record["JobID"],
        cancelled_by[1] if cancelled_by else "",
        int(float(size[1]) * (1 << _UNITS[size[2]])) if size else 0,
        record["MaxRSSNode"],
        as_known_number(record["MaxRSSTask"]),
    )


def _nodes(records: Iterator[_Record]) -> Iterator[NodeInfo]:
    """Yield each node in records once. sinfo prints a record for each pair of node and
    partition.
    """
    nodes: dict[str, NodeInfo] = {}
    for record in records:
        name = record["NodeList"]
        partitions = (record["Partition"].rstrip("*"),)
        if name in nodes:
            nodes[name] = replace(nodes[name], partitions=nodes[name].partitions + partitions)
            continue
        try:
            cpus = _read(record, "CPUs", as_number)
            memory_mib = _read(record, "Memory", as_number)
            reason = "" if record["Reason"] == "none" else as_text(record["Reason"])
        except ValueError as exc:
            cpus = 0
            memory_mib = 0
            reason = _parse_message("sinfo", exc)
        # Only the short form of the state has the star of a node that is not responding.
        mute = (
            "*" if record["StateLong"].endswith("*") and "*" not in record["StateComplete"] else ""
        )
        nodes[name] = NodeInfo(
            # NodeList, because NodeHost is the machine's own name.
            name=name,
            shown=record["StateComplete"] + mute,
            reason=reason,
            cpus=cpus,
            memory_mib=memory_mib,
            gres=as_text(record["Gres"]),
            partitions=partitions,
            reason_by=record["User"],
            allocated_mib=as_known_number(record["AllocMem"]),
            allocated_cpus=as_known_number(record["CPUsState"].partition("/")[0]),
            load=_load(record["CPUsLoad"]),
            gres_used=as_text(record["GresUsed"]),
        )
    yield from nodes.values()


def _load(text: str) -> float | None:
    """Return the load of a node, such as 0.35. None: slurmd has not reported it."""
    try:
        return float(text)
    except ValueError:
        return None


def _fields(table: _Values) -> tuple[str, ...]:
    """Return the fields of a table, each once."""
    return tuple(dict.fromkeys(field for field, _ in table.values()))


SQUEUE: Final = Query(
    ("squeue", "--noheader", "--array", "--states=all"),
    _fields(SQUEUE_VALUES),
    partial(_jobs, "squeue"),
)
# sacct has a single record for all tasks of an array that never started; the parser yields a job
# for each. A job that was requeued has a record for each attempt.
_SACCT_FIELDS: Final = ("JobID", "JobIDRaw", *_fields(SACCT_VALUES), "ReqTRES")
SACCT: Final = Query(
    ("sacct", "--noheader", "--allocations", "--parsable", "--duplicates"),
    _SACCT_FIELDS,
    partial(_jobs, "sacct"),
)
# The accounting looks up the steps of each job, so this takes longer.
SACCT_STEPS: Final = Query(
    ("sacct", "--noheader", "--parsable", "--duplicates"),
    (*_SACCT_FIELDS, "MaxRSS", "MaxRSSNode", "MaxRSSTask"),
    _jobs_with_steps,
)
SINFO: Final = Query(
    ("sinfo", "--noheader", "--Node"),
    (
        "NodeList Partition StateComplete StateLong Reason CPUs Memory Gres User AllocMem "
        "CPUsState CPUsLoad GresUsed"
    ).split(),
    _nodes,
)

# Option of sinfo: only the nodes for which Slurm has a reason, as `sinfo --list-reasons`.
OUT_OF_SERVICE: Final = "--states=down,drain,fail"


def _partitions(records: Iterator[_Record]) -> Iterator[PartitionInfo]:
    for record in records:
        counts = [int(count) if is_number(count) else 0 for count in record["NodeAIOT"].split("/")]
        allocated, idle, other, nodes = (*counts, 0, 0, 0, 0)[:4]
        yield PartitionInfo(
            name=record["Partition"].rstrip("*"),
            is_default=record["Partition"].endswith("*"),
            is_up=record["Available"] == "up",
            max_time=record["Time"],
            allocated=allocated,
            idle=idle,
            other=other,
            nodes=nodes,
        )


def parse_shown_partitions(text: str) -> tuple[PartitionInfo, ...]:
    """Return the partitions in the output of `scontrol show partition --oneliner`, which tells no
    states of nodes.
    """
    rows = [
        dict(word.split("=", 1) for word in line.split() if "=" in word)
        for line in text.splitlines()
        if line.startswith("PartitionName=")
    ]
    return tuple(
        PartitionInfo(
            name=row["PartitionName"],
            is_default=row.get("Default") == "YES",
            is_up=row.get("State") == "UP",
            max_time=row.get("MaxTime", ""),
            allocated=None,
            idle=None,
            other=None,
            nodes=as_known_number(row.get("TotalNodes", "")) or 0,
        )
        for row in rows
    )


PARTITIONS: Final = Query(
    ("sinfo", "--noheader"), "Partition Available Time NodeAIOT".split(), _partitions
)


def parse_outages(text: str, start: int, end: int) -> dict[str, str]:
    """Return node -> reason of the nodes that went down from ``start`` to ``end`` (Unix seconds).

    text: events of nodes from sacctmgr, with name, time, state and reason.
    """
    events = (line.split("|", 3) for line in text.splitlines() if line.count("|") >= 3)  # noqa: PLR2004
    return {
        node: reason
        for node, time, state, reason in events
        if state.startswith("DOWN") and start <= (as_known_number(time) or 0) <= end
    }


def _parse_error(command: str, answer: str) -> SlurmError:
    return SlurmError(
        f"clusterctl can't parse the output of {command}",
        code="internal",
        about="slurm-answer",
        why=answer[:500].encode("unicode_escape").decode(),
        fix="report this as a bug, with the version of Slurm that `clusterctl status` shows",
    )
