"""Limits of accounts and QOS for groups of jobs: does a job alone exceed the limit for which it
waits?

Slurm gives the same reason, such as AssocGrpCpuLimit, to a job that waits for other jobs to end and
to a job that is larger than the limit and can never start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from clusterctl.errors import SchedulerError, TransportError
from clusterctl.scheduler.base import JobInfo, Jobs, JobState

# A reason says who has the limit, what is limited, and whether the limit is on the product with the
# time limit in minutes.
_REASON: Final = re.compile(
    r"(?P<who>Assoc|QOS)?(?P<group>Grp|Max)(?P<what>Cpu|CPU|Mem|Memory|Node|GRES|Gres|Billing)"
    r"(?P<minutes>RunMinutes|Minutes)?(?:Per(?P<per>User|Account))?(?:Limit)?"
)
_RESOURCES: Final = {
    "cpu": "cpu",
    "mem": "mem",
    "memory": "mem",
    "node": "node",
    "billing": "billing",
    "gres": "gres/",
}
_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}
_MOST_LEVELS: Final = 8  # of accounts
_COLUMNS: Final = {
    ("Grp", ""): "GrpTRES",
    ("Grp", "Minutes"): "GrpTRESMins",
    ("Grp", "RunMinutes"): "GrpTRESRunMins",
    ("User", ""): "MaxTRESPU",
    ("Account", ""): "MaxTRESPA",
}
# Runs a command of sacctmgr or scontrol, and returns its stdout.
Ask = Callable[[Sequence[str]], str]


def with_limits(scheduler: Jobs, jobs: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
    """Return the jobs. Waiting jobs that alone exceed a limit of a group have the limit in
    ``exceeds``.
    """
    return tuple(replace(job, exceeds=_exceeds(scheduler, job)) for job in jobs)


def _exceeds(scheduler: Jobs, job: JobInfo) -> str:
    if job.state is JobState.PENDING and _REASON.fullmatch(job.reason):
        with suppress(SchedulerError, TransportError):
            return scheduler.exceeded_limit(job)
    return ""


def exceeded_limit(job: JobInfo, ask: Ask) -> str:
    """Return the limit that a waiting job alone exceeds, or "".

    The limit is such as ``cpu=8, more than GrpTRES=cpu=2 of account a``.

    ask: raises SchedulerError or TransportError if Slurm gives no answer.
    """
    match = _REASON.fullmatch(job.reason)
    if match is None:
        return ""
    column = _COLUMNS.get((match["per"] or match["group"], match["minutes"] or ""))
    resource = _RESOURCES[match["what"].lower()]
    if column is None:
        return ""
    wanted = amounts_of(job.tres)
    if match["minutes"]:
        if job.time_limit_s is None:
            return ""
        wanted = {name: amount * job.time_limit_s / 60 for name, amount in wanted.items()}
    shown = dict(part.split("=", 1) for part in job.tres.split(",") if "=" in part)
    holders = _associations(job, column, ask) if match["who"] == "Assoc" else _qos(job, column, ask)
    for holder, limits in holders:
        texts = dict(part.split("=", 1) for part in limits.split(",") if "=" in part)
        for name, limit in amounts_of(limits).items():
            if name.startswith(resource) and wanted.get(name, 0) > limit:
                times = " for its time limit" if match["minutes"] else ""
                return (
                    f"{name}={shown[name]}{times}, more than {column}={name}={texts[name]} of "
                    f"{holder}"
                )
    return ""


# The resource of Slurm for GPUs of any type.
GPU: Final = "gres/gpu"


def amounts_of(tres: str) -> Mapping[str, float]:
    """Return resource -> amount in a text such as ``cpu=2,mem=4G``. Memory without a unit is in
    MiB.
    """
    amounts = {}
    for part in tres.split(","):
        name, _, value = part.partition("=")
        if number := re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", value):
            unit = number[2] or ("M" if name == "mem" else "")
            amounts[name] = float(number[1]) * (1 << _UNITS[unit])
    return amounts


def _associations(job: JobInfo, column: str, ask: Ask) -> Iterator[tuple[str, str]]:
    """Yield (name, limits) of the user's association, its account, and the accounts above."""
    account = job.account
    cluster = ""
    for level in range(_MOST_LEVELS):
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "where"]
        answer = ask(
            [*argv, f"account={account}", f"format=Cluster,User,Partition,ParentName,{column}"]
        )
        rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 4]  # noqa: PLR2004
        if not cluster and len({row[0] for row in rows}) > 1:
            # The accounting of a site may have several clusters.
            name = re.search(
                r"^ClusterName\s*= *(\S+)", ask(["scontrol", "show", "config"]), re.MULTILINE
            )
            cluster = name[1].lower() if name else "?"
        rows = [row for row in rows if cluster in ("", row[0].lower())]
        for _, user, partition, _, limits in rows:
            if limits and user == job.user and level == 0 and partition in ("", job.partition):
                yield f"user {user} in account {account}", limits
        parent = ""
        for _, user, _, above, limits in rows:
            if not user:
                parent = above
                if limits:
                    yield f"account {account}", limits
        if not parent:
            return
        account = parent


def _qos(job: JobInfo, column: str, ask: Ask) -> Iterator[tuple[str, str]]:
    """Yield (name, limits) of the job's QOS and of the QOS of its partition."""
    partition = ask(["scontrol", "--oneliner", "show", "partition", job.partition])
    of_partition = re.search(r"\bQoS=(\S+)", partition)
    names = {job.qos, of_partition[1] if of_partition else ""}
    answer = ask(["sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format=Name,{column}"])
    for line in answer.splitlines():
        name, _, limits = line.partition("|")
        if name and name in names and limits:
            yield f"QOS {name}", limits
