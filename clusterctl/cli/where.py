"""The command where, which shows the places that would run a job, the best first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final

from clusterctl.cli.options import Words, argument, job_flags, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.ranking import rank
from clusterctl.cli.submit import jobs_to_submit
from clusterctl.errors import Notice, UsageError
from clusterctl.jobs.prepare import read_jobs
from clusterctl.jobs.where import NOW_S, Candidate
from clusterctl.scheduler.request.request import Request
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import OPTIONS
from clusterctl.spec.names import LocalValue
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_UNKNOWN: Final = "unknown"
# A job with only the resources in the options.
_NO_PROGRAM: Final = "probe"
# Here these options choose among places, instead of a default.
_ONLY: Final = {"partition": "Only this partition.", "account": "Only this account."}
# The options of a job that affect where it can run.
_SHAPING: Final = [
    replace(each, help=_ONLY.get(each.name, each.help))
    for each in OPTIONS.values()
    if each.in_shell and (each.sbatch or each.name == "slurm")
]
# (a time, the unit to which such times are rounded), in seconds.
_ACCEPTED: Final = {True: "yes", False: "no", None: _UNKNOWN}


@takes(job_flags(_SHAPING))
def where(
    screen: Screen,
    target: Annotated[
        str,
        argument(
            "A job as for `submit`. Without it, only the options count.",
            metavar="JOB",
            tab=jobs_to_submit,
            local=LocalValue.NAME,
        ),
    ] = _NO_PROGRAM,
    variant: Annotated[Words, option("The variant of the job file.")] = None,
    **given: object,
) -> None:
    """Show where a job would run, and when it would start.

    All your clusters that are up, their partitions and your accounts are compared.

    The best place comes first: Slurm accepts the job there, expects the earliest start, and the
    price is low. Nothing is submitted. With `--cluster`, only this cluster is asked.
    """
    ranking = rank(screen, Request.read(single_job(read_jobs(target, given, variant or ()))))
    now = time.time()
    answer = {
        "places": [each.as_dict(now) for each in ranking.places],
        "unanswered": ranking.answers.unanswered(),
    }
    screen.result(answer, *([] if screen.json else _lines(screen, ranking.places, now)))


def single_job(jobs: Sequence[JobSpec]) -> JobSpec:
    """Return the only job. UsageError: there are several."""
    if len(jobs) > 1:
        raise UsageError(
            f"`where` needs a single job, but the job file has {len(jobs)}",
            about="where-one-job",
            fix="choose a single job with --variant",
        )
    return jobs[0]


def _lines(screen: Screen, places: Sequence[Candidate], now: float) -> list[str]:
    head = ["PLACE", "ACCEPTED", "START", "ROOM", "NODES", "CPUS", "GPUS", "USD/H", "ASKED"]
    lines = screen.table(head, [_row(each, now) for each in places])
    reasons = [
        f"{each.place.shown}: {text}"
        for each in places
        for text in ((each.words if not each.accepted else ""), each.finding)
        if text
    ]
    unasked = sum(each.asked_at is None for each in places)
    if unasked:
        text = f"Slurm was not asked about {counted(unasked, 'place')} yet, to keep the pace of the site"
        reasons.append(Notice("where-unasked", f"{text}; run the command again in a minute"))
    return [*lines, *([""] if reasons else []), *reasons]


def _row(each: Candidate, now: float) -> list[object]:
    capacity = each.capacity
    unknown = f" ({capacity.unknown_nodes} unknown)" if capacity.unknown_nodes else ""
    return [
        each.place.shown,
        _ACCEPTED[each.accepted],
        _start(each, now),
        _UNKNOWN if capacity.fitting is None else capacity.fitting,
        f"{capacity.free_nodes}/{capacity.nodes}{unknown}" if capacity.nodes else _UNKNOWN,
        f"{capacity.free_cpus}/{capacity.cpus}" if capacity.nodes else _UNKNOWN,
        _gpus(capacity.gpus, capacity.free_gpus),
        _UNKNOWN if each.usd_per_hour is None else formatting.cost(each.usd_per_hour, ""),
        "never" if each.asked_at is None else f"{formatting.about(now - each.asked_at)} ago",
    ]


def _start(each: Candidate, now: float) -> str:
    if each.start is None:
        return _UNKNOWN if each.accepted is not False else ""
    wait_s = each.start - now
    return "now" if wait_s <= NOW_S else f"in {formatting.about(wait_s)}"


def _gpus(total: Mapping[str, int], free: Mapping[str, int]) -> str:
    return ", ".join(f"{free[name]}/{count} {name}".strip() for name, count in total.items())
