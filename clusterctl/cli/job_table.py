"""The table of jobs, which several verbs show, and how times are shown."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from typing import Final

from clusterctl.cli.output import Screen
from clusterctl.scheduler.base import JobInfo, state_counts, worst
from clusterctl.scheduler.slurm_parse import fold_nodes

_NONE: Final = "-"


def job_table(
    screen: Screen, infos: Sequence[JobInfo], *, users: bool = False, tasks: bool = False
) -> list[str]:
    """Jobs as `jobs` and `status` show them; ``users``: whose each is, too.

    An array is one line, or a line for each of its ``tasks``. None where the answer is JSON.
    """
    if screen.json:
        return []
    if not infos:
        return ["no jobs"]
    head = ["JOB", "NAME", "STATE", "NODES", "SUBMITTED", "ELAPSED", "LIMIT", "EXIT", "REASON"]
    lines = [list(one) for _, one in groupby(infos, key=lambda job: job.id if tasks else job.whole_id)]
    rows = [_job_row(one) for one in lines]
    if users:
        for row, cell in zip((head, *rows), ("USER", *(one[0].user for one in lines)), strict=True):
            row.insert(2, cell)
    return screen.table(head, rows)


def _job_row(jobs: Sequence[JobInfo]) -> list[str]:
    """A job, or the tasks of an array: how many are in which state, and the rest of the worst of them."""
    head, array = worst(jobs), len(jobs) > 1
    return [
        f"{head.whole_id} ({len(jobs)} tasks)" if array else head.id,
        head.name,
        state_counts(jobs) if array else head.state.value,
        fold_nodes(list(dict.fromkeys(node for job in jobs for node in job.nodes))),
        shown_time(head.submit_time),
        shown_elapsed(max((job.elapsed_s for job in jobs if job.elapsed_s is not None), default=None)),
        shown_elapsed(head.time_limit_s),
        head.exit or _NONE,
        head.reason,
    ]


def shown_time(at: int | None) -> str:
    """A time as people read it, of their own time zone."""
    with suppress(OverflowError, ValueError, OSError):  # a damaged record
        return _NONE if at is None else f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"
    return str(at)


def shown_elapsed(seconds: int | None) -> str:
    """A time span as Slurm writes it: ``01:30:00``, ``2-00:00:00``."""
    if seconds is None:
        return _NONE
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
