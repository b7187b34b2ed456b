"""Slurm's output as models, and the commands that ask for that output.

A job's name, comment and folder may hold every byte but NUL. So each field is followed by a separator that is
drawn at random for each command: no name holds it, and a record is as many fields as were asked for, whatever
lines they have. What of a record can't be understood spoils that record alone, which says so as its reason.
Times are asked for as Unix seconds, and the tasks of arrays in full.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ClusterShell.RangeSet import RangeSet, RangeSetException

from clusterctl.errors import SlurmError
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, Outcome, StepInfo
from clusterctl.spec.units import parse_slurm_time_s

if TYPE_CHECKING:
    from ClusterShell.NodeSet import NodeSet

ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

_SACCT_ID = re.compile(r"(?P<job>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\]))?", re.ASCII)
_YEAR_S = 365 * 86_400  # what the accounting has of a job without a limit, and in 24.11 squeue at times
_T = TypeVar("_T", JobInfo, NodeInfo, StepInfo)
_Record = dict[str, str]


@dataclass(frozen=True, slots=True)
class Query(Generic[_T]):
    """A command that only reads, the fields that it is asked for, and what they are read as."""

    argv: tuple[str, ...]
    fields: Sequence[str]
    read: Callable[[Iterator[_Record]], Iterable[_T]]

    def command(self, separator: str) -> list[str]:
        """The command whose fields are unpadded, in their full length, each followed by the separator."""
        if self.argv[0] == "sacct":
            return [*self.argv, f"--delimiter={separator}", f"--format={','.join(self.fields)}"]
        return [*self.argv, "--Format=" + ",".join(f"{field}:{separator}" for field in self.fields)]

    def parse(self, text: str, separator: str) -> tuple[_T, ...]:
        """Read the command's output.

        Raises:
            SlurmError: it was cut short, or is another command's.
        """
        *values, rest = text.split(separator)
        if rest.strip() or len(values) % len(self.fields):
            raise _odd(self.argv[0], text)
        rows = (values[start : start + len(self.fields)] for start in range(0, len(values), len(self.fields)))
        # The record before this one ended with a newline; ids and nodes' names hold none.
        records = ([first.rpartition("\n")[2], *others] for first, *others in rows)
        return tuple(self.read(dict(zip(self.fields, one, strict=True)) for one in records))


def new_separator() -> str:
    """A word that no output holds yet."""
    return f"|{os.urandom(8).hex()}|"  # a digit first would be a width


def parse_version(text: str) -> str:
    """``22.05.8`` of ``slurm-wlm 22.05.8``.

    Raises:
        SlurmError: there is no version in it.
    """
    if match := re.search(r"\d+\.\d+\S*", text):
        return match.group()
    raise _odd("sinfo --version", text)


def _is_number(text: str) -> bool:
    return text.isdigit() and text.isascii()


def _number(record: _Record, name: str) -> int:
    if not _is_number(record[name]):
        raise ValueError(f"{name} {record[name][:100]!r}")
    return int(record[name])


def _text(record: _Record, name: str) -> str:
    """A field, without Slurm's words for an empty one."""
    return "" if record[name] in {"(null)", "None", "N/A"} else record[name]


def _time(text: str) -> int | None:
    """A time; None for N/A, NONE, None, Unknown."""
    return int(text) if _is_number(text) else None


@lru_cache
def _limit_s(text: str) -> int | None:
    """A time limit; None for UNLIMITED, Partition_Limit, NOT_SET, and a year, which stands for them."""
    with suppress(ValueError):
        seconds = parse_slurm_time_s(text)
        return None if seconds == _YEAR_S else seconds
    return None


def _exit(record: _Record, name: str) -> tuple[int, int]:
    """Exit code and signal: ``1:0``, or the status of wait(2), as squeue has it before Slurm 23."""
    code, colon, signal = record[name].partition(":")
    if colon and _is_number(code) and _is_number(signal):
        return int(code), int(signal)
    status = _number(record, name)
    return status >> 8, status & 0x7F


def _state(record: _Record) -> JobState:
    word = record["State"].partition(" ")[0]  # "CANCELLED by 10000"
    if word not in JobState.__members__:
        raise ValueError(f"State {record['State'][:100]!r}")
    return JobState(word)


def _queued(record: _Record) -> Iterator[JobInfo]:
    yield _job(
        record,
        "Name UserName SubmitTime StartTime EndTime exit_code TimeLimit",
        number=_number(record, "ArrayJobID"),
        task=None if record["ArrayTaskID"] == "N/A" else _number(record, "ArrayTaskID"),
        tres=_text(record, "tres-alloc"),  # of a job that waits: what it asks for
        restarts=_number(record, "RestartCnt"),
    )


def _accounted(record: _Record) -> Iterator[JobInfo]:
    number, tasks = _accounted_id(record)
    columns = "JobName User Submit Start End ExitCode Timelimit"
    tres = _text(record, "AllocTRES") or _text(record, "ReqTRES")
    yield from (_job(record, columns, number=number, task=task, tres=tres) for task in tasks)


def _accounted_id(record: _Record) -> tuple[int, Sequence[int | None]]:
    """The job's number, and the tasks that the record stands for."""
    match = _SACCT_ID.fullmatch(record["JobID"])
    if match is None:  # such as 12+1, a component of a heterogeneous job: it has a number of its own
        return _number(record, "JobIDRaw"), [None]
    if match["task"] or match["tasks"] is None:
        return int(match["job"]), [int(match["task"]) if match["task"] else None]
    try:  # such as 0-8:2%4: from 0 to 8, each second, four at a time
        tasks = RangeSet(match["tasks"].partition("%")[0].replace(":", "/"))
    except RangeSetException as exc:
        raise ValueError(f"JobID {record['JobID'][:100]!r}") from exc
    return int(match["job"]), [int(task) for task in tasks]


def _job(record: _Record, columns: str, **fields: Any) -> JobInfo:
    """The job of a record. ``columns`` are the names that this command has for some of its fields."""
    name, user, submit, start, end, exit_code, limit = columns.split()
    state, (code, signal) = _state(record), _exit(record, exit_code)
    started = _time(record[start])
    if state.outcome is Outcome.GOES_ON:
        # Slurm's guesses about what is still to come are no facts: one is kept as such.
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
    """The jobs of records. One that can't be understood is UNKNOWN, and says so as its reason.

    It keeps its user and its nodes: they are at work, whatever the job does there.
    """
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
                reason=_not_understood(command, exc),
                comment=_text(record, "Comment"),
            )


def _not_understood(command: str, cause: ValueError) -> str:
    return f"clusterctl does not understand what {command} says: {cause}"


_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def _step(record: _Record) -> StepInfo:
    size = re.fullmatch(r"([0-9.]+)([KMGT]?)", record["MaxRSS"])
    by = re.fullmatch(r"CANCELLED by ([0-9]+)", record["State"])
    return StepInfo(
        record["JobID"],
        by[1] if by else "",
        int(float(size[1]) * (1 << _UNITS[size[2]])) if size else 0,
        record["MaxRSSNode"],
    )


def _nodes(records: Iterator[_Record]) -> Iterator[NodeInfo]:
    """sinfo has a record for each node and partition."""
    nodes: dict[str, NodeInfo] = {}
    for record in records:
        name, partitions = record["NodeList"], (record["Partition"].rstrip("*"),)
        if name in nodes:
            nodes[name] = replace(nodes[name], partitions=nodes[name].partitions + partitions)
            continue
        try:
            cpus, memory_mib = _number(record, "CPUs"), _number(record, "Memory")
            reason = "" if record["Reason"] == "none" else _text(record, "Reason")
        except ValueError as exc:
            cpus, memory_mib, reason = 0, 0, _not_understood("sinfo", exc)
        # Only the short form of the state has the star of a node that does not answer.
        mute = "*" if record["StateLong"].endswith("*") and "*" not in record["StateComplete"] else ""
        nodes[name] = NodeInfo(
            name=name,  # NodeHost is what the machine calls itself
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
    "JobID ArrayJobID ArrayTaskID Name UserName Partition Account QOS State Reason exit_code NodeList "
    "SubmitTime StartTime EndTime TimeLimit tres-alloc WorkDir Comment RestartCnt".split(),
    partial(_jobs, "squeue", "ArrayJobID"),
)
# Tasks of an array that never started are one record there; here each has its own.
SACCT: Final = Query(
    ("sacct", "--noheader", "--allocations", "--parsable"),
    "JobID JobIDRaw JobName User Partition Account QOS State Reason ExitCode NodeList Submit Start End "
    "Timelimit AllocTRES ReqTRES WorkDir Comment".split(),
    partial(_jobs, "sacct", "JobID"),
)
STEPS: Final = Query(
    ("sacct", "--noheader", "--parsable"),
    "JobID State MaxRSS MaxRSSNode".split(),
    partial(map, _step),
)
SINFO: Final = Query(
    ("sinfo", "--noheader", "--Node"),
    "NodeList Partition StateComplete StateLong Reason CPUs Memory Gres User AllocMem".split(),
    _nodes,
)


def _odd(command: str, what: str) -> SlurmError:
    return SlurmError(
        f"{command} answered what clusterctl does not understand",
        code="slurm-answer-garbled",
        why=what[:500].encode("unicode_escape").decode(),
        fix="report it, with the version that `clusterctl status` shows for Slurm",
    )


def expand_nodes(nodelist: str) -> tuple[str, ...]:
    """The node names of a Slurm hostlist such as ``a-[1-3,7]``; none for Slurm's words for "not yet".

    Raises:
        ValueError: it is no hostlist.
    """
    if nodelist in {"", "None assigned", "(null)", "N/A"}:
        return ()
    if not {",", "["} & set(nodelist):
        return (nodelist,)
    return tuple(_node_set(nodelist))


def fold_nodes(nodes: Sequence[str]) -> str:
    """Nodes as a Slurm hostlist: ``a-[1-3,7]``."""
    with suppress(ValueError):
        return str(_node_set(",".join(nodes))) if len(nodes) > 1 else "".join(nodes)
    return ",".join(nodes)


def _node_set(nodelist: str) -> NodeSet:
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # noqa: PLC0415 - one name needs no parser

    try:
        return NodeSet(nodelist)
    except NodeSetException as exc:
        raise ValueError(f"NodeList {nodelist[:100]!r}") from exc
