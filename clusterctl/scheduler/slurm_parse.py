"""Parser of Slurm's output, and the commands that produce it.

A job's name, comment and folder may hold every byte but NUL, including newlines. So each field is
followed by a separator that is random for each command, and a record is a fixed number of fields. A
record that can't be parsed becomes a job or node with the error as its reason. Times are Unix
seconds. Each task of an array becomes a job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final, Generic, TypeVar

from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.RangeSet import RangeSet, RangeSetException

from clusterctl.errors import SlurmError
from clusterctl.scheduler.attempts import Attempt
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, Outcome, StepInfo
from clusterctl.spec.units import parse_slurm_time_s

ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

_SACCT_ID = re.compile(r"(?P<job>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\]))?", re.ASCII)
# Time limit of a job without a limit in sacct's output, and sometimes in squeue's in 24.11.
_YEAR_S = 365 * 86_400
_Record = dict[str, str]


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition of a cluster that other people operate, with the numbers of its nodes by state.

    max_time: the time limit as Slurm writes it. other: nodes that are down or drained, for example.
    """

    name: str
    is_default: bool
    is_up: bool
    max_time: str
    allocated: int
    idle: int
    other: int
    nodes: int

    @property
    def usable(self) -> bool:
        """Whether Slurm starts jobs in the partition, now or when nodes are free."""
        return self.is_up and self.allocated + self.idle > 0


_T = TypeVar("_T", JobInfo, NodeInfo, PartitionInfo, StepInfo)


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
        """Parse the command's output into jobs, nodes or steps. Raises SlurmError if that is
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


def _is_number(text: str) -> bool:
    return text.isdigit() and text.isascii()


def _number(record: _Record, name: str) -> int:
    if not _is_number(record[name]):
        raise ValueError(f"{name} {record[name][:100]!r}")
    return int(record[name])


def _text(record: _Record, name: str) -> str:
    """Return a field; "" for a text such as (null), which Slurm prints for an empty field."""
    return "" if record[name] in {"(null)", "None", "N/A"} else record[name]


def _time(text: str) -> int | None:
    """Return the number in a field's text, such as a Unix time; None for a text such as N/A or
    Unknown.
    """
    return int(text) if _is_number(text) else None


@lru_cache
def _limit_s(text: str) -> int | None:
    """Return a time limit in seconds. None for UNLIMITED, NOT_SET, and 365 days, which mean no
    limit.
    """
    with suppress(ValueError):
        seconds = parse_slurm_time_s(text)
        return None if seconds == _YEAR_S else seconds
    return None


def _exit(record: _Record, name: str) -> tuple[int, int]:
    """Return (exit code, signal) from ``1:0`` or, in squeue before Slurm 23, from a status of
    wait(2).
    """
    code, colon, signal = record[name].partition(":")
    if colon and _is_number(code) and _is_number(signal):
        return int(code), int(signal)
    status = _number(record, name)
    return status >> 8, status & 0x7F


def _state(record: _Record) -> JobState:
    # The state may be "CANCELLED by 10000".
    word = record["State"].partition(" ")[0]
    if word not in JobState.__members__:
        raise ValueError(f"State {record['State'][:100]!r}")
    return JobState(word)


def _queued(record: _Record) -> Iterator[JobInfo]:
    yield _job(
        record,
        "Name UserName SubmitTime StartTime EndTime exit_code TimeLimit",
        number=_number(record, "ArrayJobID"),
        slurm_id=_number(record, "JobID"),
        task=None if record["ArrayTaskID"] == "N/A" else _number(record, "ArrayTaskID"),
        # For a pending job, the field has the requested resources.
        tres=_text(record, "tres-alloc"),
        restarts=_number(record, "RestartCnt"),
    )


def _accounted(record: _Record) -> Iterator[JobInfo]:
    number, tasks = _accounted_id(record)
    columns = "JobName User Submit Start End ExitCode Timelimit"
    tres = _text(record, "AllocTRES") or _text(record, "ReqTRES")
    for task in tasks:
        raw = record["JobIDRaw"]
        slurm_id = int(raw) if _is_number(raw) else None
        job = _job(record, columns, number=number, task=task, tres=tres, slurm_id=slurm_id)
        # An attempt of a requeued job has ended, although the job has not.
        yield replace(job, end_time=_time(record["End"])) if job.state is JobState.REQUEUED else job


def with_attempts(records: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
    """Return each job in sacct's records once, as it is now, with its attempts and the first
    submission.

    records: of each attempt, in order. Records of a job with another folder belong to a job that
        had the same id before Slurm's numbers began again.
    """
    jobs = {job.id: job for job in records}
    own: dict[str, list[JobInfo]] = {job_id: [] for job_id in jobs}
    for record in records:
        if record.work_dir == jobs[record.id].work_dir:
            own[record.id].append(record)
    return tuple(
        replace(
            job,
            submit_time=own[job_id][0].submit_time,
            # A job that was cancelled in the queue may have a start time, but it has no nodes.
            attempts=tuple(
                Attempt(
                    start_time=each.start_time,
                    end_time=each.end_time,
                    nodes=each.nodes,
                    state=each.state.value if each.end_time is not None else "",
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
        return _number(record, "JobIDRaw"), [None]
    if match["task"] or match["tasks"] is None:
        return int(match["job"]), [int(match["task"]) if match["task"] else None]
    try:
        # For example 0-8:2%4: from 0 to 8, each second, at most four at a time.
        tasks = RangeSet(match["tasks"].partition("%")[0].replace(":", "/"))
    except RangeSetException as exc:
        raise ValueError(f"JobID {record['JobID'][:100]!r}") from exc
    return int(match["job"]), [int(task) for task in tasks]


def _job(record: _Record, columns: str, **fields: Any) -> JobInfo:
    """Convert a record. columns: its names of the fields that squeue and sacct name differently."""
    name, user, submit, start, end, exit_code, limit = columns.split()
    state, (code, signal) = _state(record), _exit(record, exit_code)
    started = _time(record[start])
    if state.outcome is Outcome.GOES_ON:
        # Start and end are Slurm's estimates; only the expected start is kept.
        waits = state is JobState.PENDING
        fields["expected_start"] = started if waits else None
        fields["start_time"] = None if waits else started
    else:
        fields |= {"exit_code": code, "signal": signal, "start_time": started}
        fields["end_time"] = _time(record[end])
    return JobInfo(
        name=record[name],
        user=record[user],
        partition=record["Partition"],
        account=_text(record, "Account"),
        qos=_text(record, "QOS"),
        state=state,
        nodes=expand_nodes(record["NodeList"]),
        reason=_text(record, "Reason"),
        submit_time=_time(record[submit]),
        time_limit_s=_limit_s(record[limit]),
        work_dir=record["WorkDir"],
        comment=_text(record, "Comment"),
        **fields,
    )


def _jobs(command: str, read: str, records: Iterator[_Record]) -> Iterator[JobInfo]:
    """Convert records. An invalid record becomes a job in state UNKNOWN. read: the field with a
    job's id.
    """
    # The nodes of an invalid record are in use too, so its job gets them if possible.
    for record in records:
        try:
            yield from _queued(record) if command == "squeue" else _accounted(record)
        except ValueError as exc:
            number = re.match(r"[0-9]{0,18}", record[read], re.ASCII)
            task = re.fullmatch(r"[0-9]{1,18}", record.get("ArrayTaskID", ""), re.ASCII)
            nodes: tuple[str, ...] = ()
            with suppress(ValueError):
                nodes = expand_nodes(record["NodeList"])
            yield JobInfo(
                number=int((number and number[0]) or 0),
                task=int(task[0]) if task else None,
                name=record.get("Name", record.get("JobName", "")),
                user=record.get("UserName", record.get("User", "")),
                partition=record["Partition"],
                state=JobState.UNKNOWN,
                nodes=nodes,
                reason=_parse_message(command, exc),
                comment=_text(record, "Comment"),
            )


def _parse_message(command: str, cause: ValueError) -> str:
    return f"clusterctl can't parse the output of {command}: {cause}"


_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def _step(record: _Record) -> StepInfo:
    size = re.fullmatch(r"([0-9.]+)([KMGT]?)", record["MaxRSS"])
    cancelled_by = re.fullmatch(r"CANCELLED by ([0-9]+)", record["State"])
    return StepInfo(
        record["JobID"],
        cancelled_by[1] if cancelled_by else "",
        int(float(size[1]) * (1 << _UNITS[size[2]])) if size else 0,
        record["MaxRSSNode"],
        _time(record["MaxRSSTask"]),
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
            cpus = _number(record, "CPUs")
            memory_mib = _number(record, "Memory")
            reason = "" if record["Reason"] == "none" else _text(record, "Reason")
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
            gres=_text(record, "Gres"),
            partitions=partitions,
            reason_by=record["User"],
            allocated_mib=_time(record["AllocMem"]) or 0,
        )
    yield from nodes.values()


SQUEUE: Final = Query(
    ("squeue", "--noheader", "--array", "--states=all"),
    "JobID ArrayJobID ArrayTaskID Name UserName Partition Account QOS State Reason exit_code "
    "NodeList SubmitTime StartTime EndTime TimeLimit tres-alloc WorkDir Comment RestartCnt".split(),
    partial(_jobs, "squeue", "ArrayJobID"),
)
# sacct has a single record for all tasks of an array that never started; the parser yields a job
# for each. A job that was requeued has a record for each attempt.
SACCT: Final = Query(
    ("sacct", "--noheader", "--allocations", "--parsable", "--duplicates"),
    "JobID JobIDRaw JobName User Partition Account QOS State Reason ExitCode NodeList Submit "
    "Start End Timelimit AllocTRES ReqTRES WorkDir Comment".split(),
    partial(_jobs, "sacct", "JobID"),
)
STEPS: Final = Query(
    ("sacct", "--noheader", "--parsable"),
    "JobID State MaxRSS MaxRSSNode MaxRSSTask".split(),
    partial(map, _step),
)
SINFO: Final = Query(
    ("sinfo", "--noheader", "--Node"),
    "NodeList Partition StateComplete StateLong Reason CPUs Memory Gres User AllocMem".split(),
    _nodes,
)


def _partitions(records: Iterator[_Record]) -> Iterator[PartitionInfo]:
    for record in records:
        counts = [int(count) if _is_number(count) else 0 for count in record["NodeAIOT"].split("/")]
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
        if state.startswith("DOWN") and start <= (_time(time) or 0) <= end
    }


def _parse_error(command: str, answer: str) -> SlurmError:
    return SlurmError(
        f"clusterctl can't parse the output of {command}",
        code="slurm-answer-garbled",
        why=answer[:500].encode("unicode_escape").decode(),
        fix="report this as a bug, with the version of Slurm that `clusterctl status` shows",
    )


def expand_nodes(nodelist: str) -> tuple[str, ...]:
    """Return the node names in a Slurm hostlist such as ``a-[1-3,7]``; raise ValueError if it is
    invalid.
    """
    if nodelist in {"", "None assigned", "(null)", "N/A"}:
        return ()
    if not {",", "["} & set(nodelist):
        return (nodelist,)
    return tuple(_node_set(nodelist))


def fold_nodes(nodes: Sequence[str]) -> str:
    """Return nodes as a Slurm hostlist: ``a-[1-3,7]``."""
    with suppress(ValueError):
        return str(_node_set(",".join(nodes))) if len(nodes) > 1 else "".join(nodes)
    return ",".join(nodes)


def _node_set(nodelist: str) -> NodeSet:
    try:
        return NodeSet(nodelist)
    except NodeSetException as exc:
        raise ValueError(f"NodeList {nodelist[:100]!r}") from exc
