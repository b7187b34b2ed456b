"""Slurm's output as models, and the format options that ask for that output.

Fields and records are separated by control characters, since names, folders and reasons may hold anything
that can be typed. Times are asked for as Unix seconds (``SLURM_TIME_FORMAT``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ClusterShell.RangeSet import RangeSet

from clusterctl.errors import SlurmError
from clusterctl.scheduler.models import JobInfo, JobState, NodeInfo
from clusterctl.slurm.hostlist import expand_nodes

FIELD = "\x1f"
RECORD = "\x1e"
TIME_ENV = {"SLURM_TIME_FORMAT": "%s"}

SQUEUE_FIELDS = (
    "JobID ArrayJobID ArrayTaskID Name UserName Partition Account QOS State Reason exit_code NodeList "
    "SubmitTime StartTime EndTime WorkDir Comment RestartCnt"
).split()
SACCT_FIELDS = (
    "JobID JobName User Partition Account QOS State Reason ExitCode NodeList Submit Start End WorkDir Comment"
).split()
SINFO_FIELDS = "NodeList Partition StateComplete StateLong Reason CPUs Memory Gres User AllocMem".split()


def _long_format(fields: Sequence[str]) -> str:
    """The value of ``-O``: each field unpadded and followed by a separator, the last by the record's end."""
    return ",".join(f"{field}:{FIELD}" for field in fields[:-1]) + f",{fields[-1]}:{RECORD}"


SQUEUE_FORMAT = ("--noheader", "--array", "--states=all", "--Format", _long_format(SQUEUE_FIELDS))
SACCT_FORMAT = (
    "--noheader",
    "--allocations",
    "--parsable2",
    f"--delimiter={FIELD}",
    "--format=" + ",".join(SACCT_FIELDS),
)
SINFO_FORMAT = ("--noheader", "--Node", "--Format", _long_format(SINFO_FIELDS))

_SACCT_ID = re.compile(r"(?P<job>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\]))?")


def parse_squeue(text: str) -> tuple[JobInfo, ...]:
    """The jobs of ``squeue`` called with SQUEUE_FORMAT.

    Raises:
        SlurmError: the output is not of that form.
    """
    records = (record.lstrip("\n") for record in text.split(RECORD))
    return tuple(_queued(_fields(record, SQUEUE_FIELDS, "squeue")) for record in records if record)


def parse_sacct(text: str) -> tuple[JobInfo, ...]:
    """The jobs of ``sacct`` called with SACCT_FORMAT.

    Tasks of an array that never started are one record there; here each has its own.

    Raises:
        SlurmError: the output is not of that form.
    """
    jobs: list[JobInfo] = []
    for line in text.split("\n"):  # not splitlines: names may hold what else it takes for a line's end
        if line:
            jobs += _accounted(_fields(line, SACCT_FIELDS, "sacct"))
    return tuple(jobs)


def parse_sinfo(text: str) -> tuple[NodeInfo, ...]:
    """The nodes of ``sinfo`` called with SINFO_FORMAT; sinfo has a line a node and partition.

    Raises:
        SlurmError: the output is not of that form.
    """
    nodes: dict[str, NodeInfo] = {}
    for record in text.split(RECORD):
        if not record.strip("\n"):
            continue
        row = _fields(record.lstrip("\n"), SINFO_FIELDS, "sinfo")
        node = _node(row)
        if known := nodes.get(node.name):
            node = replace(known, partitions=known.partitions + node.partitions)
        nodes[node.name] = node
    return tuple(nodes.values())


def parse_version(text: str) -> str:
    """``22.05.8`` of ``slurm-wlm 22.05.8``.

    Raises:
        SlurmError: there is no version in it.
    """
    if match := re.search(r"\d+\.\d+\S*", text):
        return match.group()
    raise _odd("sinfo --version", text)


def _fields(record: str, names: Sequence[str], command: str) -> dict[str, str]:
    values = record.split(FIELD)
    if len(values) != len(names):
        raise _odd(command, record)
    return dict(zip(names, values, strict=True))


def _queued(row: dict[str, str]) -> JobInfo:
    state = _state(row["State"], "squeue")
    status = _int(row["exit_code"], "squeue")  # as wait(2) gives it
    task = None if row["ArrayTaskID"] == "N/A" else _int(row["ArrayTaskID"], "squeue")
    return _job(
        row,
        job_id=_int(row["ArrayJobID"], "squeue"),
        task=task,
        name=row["Name"],
        user=row["UserName"],
        state=state,
        exit_code=status >> 8,
        signal=status & 0x7F,
        times=(row["SubmitTime"], row["StartTime"], row["EndTime"]),
        restarts=_int(row["RestartCnt"], "squeue"),
    )


def _accounted(row: dict[str, str]) -> list[JobInfo]:
    match = _SACCT_ID.fullmatch(row["JobID"])
    code = re.fullmatch(r"(\d+):(\d+)", row["ExitCode"])
    if match is None or code is None:
        raise _odd("sacct", repr(row))
    tasks: Sequence[int | None] = [None]
    if match["task"]:
        tasks = [int(match["task"])]
    elif match["tasks"]:  # such as 0-8:2%4: from 0 to 8, each second, four at a time
        tasks = [int(task) for task in RangeSet(match["tasks"].partition("%")[0].replace(":", "/"))]
    return [
        _job(
            row,
            job_id=int(match["job"]),
            task=task,
            name=row["JobName"],
            user=row["User"],
            state=_state(row["State"].split()[0], "sacct"),  # "CANCELLED by 10000"
            exit_code=int(code[1]),
            signal=int(code[2]),
            times=(row["Submit"], row["Start"], row["End"]),
            restarts=None,
        )
        for task in tasks
    ]


def _job(
    row: dict[str, str],
    *,
    job_id: int,
    task: int | None,
    name: str,
    user: str,
    state: JobState,
    exit_code: int,
    signal: int,
    times: tuple[str, str, str],
    restarts: int | None,
) -> JobInfo:
    submit, start, end = map(_time, times)
    job = JobInfo(
        job_id=job_id,
        task=task,
        name=name,
        user=user,
        partition=row["Partition"],
        account=_text(row["Account"]),
        qos=_text(row["QOS"]),
        state=state,
        reason=_text(row["Reason"]),
        exit_code=exit_code,
        signal=signal,
        nodes=expand_nodes(row["NodeList"]),
        submit_time=submit,
        start_time=start,
        end_time=end,
        work_dir=row["WorkDir"],
        comment=_text(row["Comment"]),
        restarts=restarts,
    )
    if job.ended:
        return job
    # Slurm's guesses about what is still to come are left out.
    started = None if state is JobState.PENDING else start
    return replace(job, exit_code=None, signal=None, start_time=started, end_time=None)


def _node(row: dict[str, str]) -> NodeInfo:
    # Only the short form of the state has the star of a node that does not answer.
    mute = "*" if row["StateLong"].endswith("*") and "*" not in row["StateComplete"] else ""
    return NodeInfo(
        name=row["NodeList"],  # one a row; NodeHost is what the machine calls itself
        shown=row["StateComplete"] + mute,
        reason="" if row["Reason"] == "none" else row["Reason"],
        cpus=_int(row["CPUs"], "sinfo"),
        memory_mib=_int(row["Memory"], "sinfo"),
        gres=_text(row["Gres"]),
        partitions=(row["Partition"].rstrip("*"),),
        reason_by=row["User"],
        allocated_mib=int(row["AllocMem"]) if row["AllocMem"].isdigit() else 0,
    )


def _state(word: str, command: str) -> JobState:
    try:
        return JobState(word)
    except ValueError as exc:
        raise _odd(command, f"job state {word!r}") from exc


def _int(word: str, command: str) -> int:
    try:
        return int(word)
    except ValueError as exc:
        raise _odd(command, f"{word!r} in place of a number") from exc


def _time(word: str) -> int | None:
    return int(word) if word.isdigit() else None  # otherwise N/A, NONE, None, Unknown


def _text(word: str) -> str:
    return "" if word in {"(null)", "None", "N/A"} else word


def _odd(command: str, what: str) -> SlurmError:
    return SlurmError(
        f"{command} answered what clusterctl does not understand",
        why=what[:500].encode("unicode_escape").decode(),
        fix="report it, with the version that `clusterctl status` shows for Slurm",
    )
