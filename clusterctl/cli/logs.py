"""The command logs, which shows the output or the stacks of a job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from clusterctl.cli.messages import Notify, telling
from clusterctl.cli.options import argument, job_ids, option
from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.cli.waiting import follow_job
from clusterctl.errors import (
    Notice,
    SchedulerError,
    TransportError,
    excluded,
    unaccompanied,
)
from clusterctl.jobs import watch
from clusterctl.jobs.log_text import MOST_KEPT, KeptLogs, labelled
from clusterctl.jobs.messages import chosen_receivers
from clusterctl.jobs.queue import packed_task, settled_jobs
from clusterctl.jobs.stacks import stacks_of
from clusterctl.scheduler.base import JobInfo, worst_job
from clusterctl.scheduler.ends.diagnosis import Diagnosis, notices_of
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, Session, open_session
from clusterctl.state.run_names import cluster_of_jobs, job_id_of, newest_job
from clusterctl.util.process import start_in_thread


def logs(
    screen: Screen,
    job_id: Annotated[
        str | None,
        argument(
            "Job ID, such as 12, 12_3 (a task) or demo/12, or a run. Default: the newest job of "
            "this folder's project.",
            metavar="[ID]",
            tab=job_ids,
        ),
    ] = None,
    follow: Annotated[
        bool, option("Follow the output until the job has ended.", "--follow", "-f")
    ] = False,
    rank: Annotated[
        int | None, option("Show only the output of this rank.", least=0, metavar="N")
    ] = None,
    label: Annotated[bool, option("Begin each line with its rank, such as `1: `.")] = False,
    raw: Annotated[bool, option("Write the bytes unchanged to files and pipes.")] = False,
    stacks: Annotated[
        bool,
        option(
            "Show where the ranks of the running job are, instead. -v also shows their stacks, which "
            "are written to rank-logs/RANK.stack in the job's folder."
        ),
    ] = False,
    notify: Notify = None,
    file: Annotated[Path | None, option("Cluster spec. Default: ./cluster.yaml.")] = None,
) -> None:
    """Print a job's stdout and stderr. Ctrl-C detaches; the job keeps running.

    Colors are kept; other control characters are escaped.
    """
    if stacks:
        beside = {
            "--follow": follow,
            "--rank": rank is not None,
            "--label": label,
            "--raw": raw,
            "--notify": notify,
        }
        for flag_name in (name for name, is_given in beside.items() if is_given):
            raise excluded("--stacks", flag_name)
        _show_stacks(screen, _named(screen, job_id))
        return
    if raw and screen.json:
        raise excluded("--raw", "-o json")
    if notify and not follow:
        raise unaccompanied("--notify", "--follow")
    receivers = chosen_receivers(notify or ()) if follow else ()
    job_id = _named(screen, job_id)
    collected = KeptLogs()
    output = nullcontext(collected.keep) if screen.json else screen.logs(raw=raw)
    ranks = str(rank) if rank is not None else "all" if label else ""
    state: dict[str, Any] = {}
    shown: Sequence[JobInfo] = ()
    found: Mapping[str, Diagnosis] = {}
    try:
        with (
            open_session(cluster_of_jobs([job_id], screen.chosen())) as session,
            output as on_output,
            labelled(on_output) if label and not screen.json else nullcontext(on_output) as show,
        ):
            job_id = job_id_of(job_id, session.ledger)
            if follow:
                with telling(screen, receivers) as told:
                    ended = follow_job(
                        screen, session, job_id, None, show=show, rank=ranks, telling=told
                    )
                state = {"state": worst_job(ended).state.value}
            else:
                jobs = start_in_thread(functools.partial(_jobs_of, session, job_id))
                most = MOST_KEPT if screen.json else 0
                watch.logs(session, job_id, on_output=show, rank=ranks, most=most)
                with contextlib.suppress(SchedulerError, TransportError):
                    shown = [job for job in jobs() if job.ended]
                    found = {} if raw else watch.judge(session, shown)
    except ENDINGS:
        if not follow:
            raise
    finally:
        screen.partial_answer = {
            "job_id": job_id,
            "logs": [asdict(log) for log in collected.texts()],
        }
    screen.note(*notices_of(found.values()))
    if (worst := watch.first_of(shown, found)) is not None:
        (job,) = (job for job in shown if job.id == worst.job_id)
        state = {"diagnosis": worst.as_dict()}
        if worst.cause:
            screen.note(f"{Ending.of([job], worst).summary}; fix: {worst.fix}")
    screen.result({**screen.partial_answer, **state})


def _named(screen: Screen, job_id: str | None) -> str:
    """Return the job's name: by default, that of the newest job, which a note tells."""
    if job_id is not None:
        return job_id
    newest = newest_job(screen.chosen())
    name = newest.entry.name if newest.entry else ""
    screen.note(Notice("newest-job", f"job {newest.full_name} ({name}), the newest"))
    return newest.full_name


def _jobs_of(session: Session, job_id: str) -> tuple[JobInfo, ...]:
    inside = packed_task(session, job_id)
    return inside or settled_jobs(session, job_id) or session.scheduler.jobs([job_id])


def _show_stacks(screen: Screen, job_id: str) -> None:
    """Show where the ranks of a running job are, those at the same place together."""
    chosen = cluster_of_jobs([job_id], screen.chosen())
    with (
        open_session(chosen, patience_s=SHOWN_PATIENCE_S) as session,
        screen.working("reading the stacks"),
    ):
        job_stacks = stacks_of(session, job_id)
    lines = list(job_stacks.groups) or [f"no rank of job {job_id} is running"]
    for rank in job_stacks.ranks if screen.verbose else ():
        lines += ["", f"rank {rank['rank']} on {rank['node']}: {rank['state']}", *rank["stack"]]
    screen.result(job_stacks.as_dict(), *lines)
