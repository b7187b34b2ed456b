"""The command cancel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from clusterctl.cli.options import JobIds, option
from clusterctl.cli.output import Screen
from clusterctl.jobs import queue
from clusterctl.scheduler.base import JobInfo, state_counts
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, open_session
from clusterctl.state.run_names import cluster_of_jobs


def cancel(
    screen: Screen,
    ids: JobIds,
    dry_run: Annotated[bool, option("Show the jobs that would be cancelled.", "--dry-run")] = False,
) -> None:
    """Cancel jobs. The ID of an array cancels all its tasks."""
    more = {}
    chosen = cluster_of_jobs(ids, screen.chosen(), certain=True)
    with open_session(chosen, patience_s=SHOWN_PATIENCE_S) as session:
        if dry_run:
            cancellation = queue.select(session, ids)
            more = {"dry_run": True, "cluster": session.inventory.cluster}
        else:
            cancellation = queue.cancel(session, ids)
    jobs = [
        job for job in cancellation.jobs if not {job.id, job.whole_id} & cancellation.errors.keys()
    ]
    cancelled, ended = ([job for job in jobs if job.ended is over] for over in (False, True))
    done = "would cancel" if dry_run else "cancelled"
    lines = [f"{done} {named}" for named in _named(cancelled)]
    lines += [
        f"{named} had already ended: "
        f"{state_counts(tasks) if len(tasks) > 1 else tasks[0].state.value}"
        for named, tasks in _named(ended).items()
    ]
    answer = {
        **more,
        "cancelled": [job.id for job in cancelled],
        "already_ended": [{"job_id": job.id, "state": job.state.value} for job in ended],
    }
    if cancellation.errors:
        screen.partial_answer = answer
        screen.note(*lines)
        cancellation.raise_errors()
    screen.result(answer, *lines)


def _named(jobs: Sequence[JobInfo]) -> dict[str, list[JobInfo]]:
    """Return words for each job, or each array of which several tasks are meant -> its tasks."""
    arrays: dict[str, list[JobInfo]] = {}
    for job in jobs:
        arrays.setdefault(job.whole_id, []).append(job)
    named = {}
    for array_id, tasks in arrays.items():
        text = f"{len(tasks)} tasks of job {array_id}" if len(tasks) > 1 else f"job {tasks[0].id}"
        named[f"{text} ({tasks[0].name})"] = tasks
    return named
