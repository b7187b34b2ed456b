"""jobs, logs, cancel, collect: the verbs of a job's life."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli.completing import job_ids
from clusterctl.cli.options import Options, OutFolder, verb
from clusterctl.cli.show import Screen
from clusterctl.cli.watching import KeptLogs, follow_job, open_session
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.scheduler.models import JobInfo
    from clusterctl.state.ledger import RunRecord

_MOST_REASONS = 8

Ids = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="Job ids, such as 12, or 12_3 of an array.", autocompletion=job_ids),
]


def jobs_(
    screen: Screen,
    options: Options,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="Only these jobs.", autocompletion=job_ids)
    ] = None,
) -> None:
    """Show jobs that wait, run, or were submitted from here."""
    from clusterctl.jobs.control import as_dict, known_jobs, list_jobs

    with open_session(screen, options) as session:
        found = known_jobs(session, ids) if ids else list_jobs(session)
    lines = job_table(screen, found) if found else ["no jobs"]
    screen.result({"jobs": [as_dict(job) for job in found]}, *lines)


def logs(
    screen: Screen,
    options: Options,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Job id.", autocompletion=job_ids)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Into files and pipes, pass the bytes unchanged."),
    ] = False,
) -> None:
    """Show what a job has written; its stderr goes to stderr. Ctrl-C detaches, the job goes on.

    Colors stay; whatever else a terminal would act upon becomes visible.
    """
    from clusterctl.jobs.watch import logs
    from clusterctl.scheduler.models import worst

    if raw and screen.json:
        raise UsageError("--raw and -o json exclude each other", fix="say one of them; JSON changes no text")
    kept = KeptLogs()
    shown = contextlib.nullcontext(kept.keep) if screen.json else screen.logs(raw=raw)
    state = {}
    try:
        with open_session(screen, options) as session, shown as show:
            if follow:
                ended = follow_job(screen, session, job_id, None, show=show)
                state = {"state": worst(ended).state.value}
            else:
                logs(session, job_id, on_output=show)
    except KeyboardInterrupt:
        if not follow:
            raise  # else detaching is what was asked for
    finally:
        screen.known = {"job_id": job_id, "logs": kept.as_list()}
    screen.result({**screen.known, **state})


def cancel(screen: Screen, options: Options, ids: Ids) -> None:
    """Cancel jobs; an array's id stands for all its tasks."""
    from clusterctl.jobs.control import cancel

    with open_session(screen, options) as session:
        done = cancel(session, ids)
    lines = [f"cancelled job {job.id} ({job.name})" for job in done.cancelled]
    lines += [f"job {job.id} ({job.name}) had ended already: {job.state}" for job in done.ended]
    answer = {
        "cancelled": [job.id for job in done.cancelled],
        "already_ended": [{"job_id": job.id, "state": job.state.value} for job in done.ended],
    }
    screen.result(answer, *lines)


def collect(
    screen: Screen,
    options: Options,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="Default: all not yet home.", autocompletion=job_ids),
    ] = None,
    out: OutFolder = None,
    max_file: Annotated[
        str, typer.Option(metavar="SIZE", help="Leave larger files on the cluster, and name them.")
    ] = "64GiB",
) -> None:
    """Bring runs home, each file checked by its hash.

    A run is a job's logs, metrics, telemetry, accounting, and what else it wrote into its folder.
    """
    from clusterctl.runs.collect import collect
    from clusterctl.spec.units import parse_size_mib

    try:
        most = parse_size_mib(max_file) << 20
    except ValueError as exc:
        raise UsageError("--max-file is wrong", why=str(exc)) from exc
    with open_session(screen, options) as session:
        runs = collect(session, ids or None, out=out or Path("runs"), max_file=most)
    answer = [
        {
            "job_id": r.job_id,
            "state": r.state,
            "dir": str(r.directory),
            "skipped": len(r.skipped),
            "cost_usd": r.cost_usd,
        }
        for r in runs
    ]
    for run in runs:
        if stays := not_brought_home(run):
            screen.note(f"note: {stays}; it ends with the cluster")
    lines = [
        f"job {run.job_id} ({run.name}) {run.state}: {_nearby(run.directory)}{_cost(run)}" for run in runs
    ]
    screen.result({"runs": answer}, *(lines or ["nothing to collect"]))


def _cost(run: RunRecord) -> str:
    return "" if run.cost_usd is None else f", {run.cost_usd:.2f} USD"


def job_table(screen: Screen, infos: Sequence[JobInfo]) -> list[str]:
    """Jobs as `jobs` and `status` show them."""
    rows = [[j.id, j.name, j.user, j.partition, j.state.value, ",".join(j.nodes), j.reason] for j in infos]
    return screen.table(["JOB", "NAME", "USER", "PARTITION", "STATE", "NODES", "REASON"], rows)


def not_brought_home(run: RunRecord) -> str:
    """What of a job's files stayed on the cluster, in one line; "" if nothing did that is not here, too."""
    from clusterctl.state.ledger import UNCHANGED

    by_reason: dict[str, list[str]] = {}
    for skipped in (one for one in run.skipped if one.reason != UNCHANGED):
        by_reason.setdefault(skipped.reason, []).append(skipped.path)
    if not by_reason:
        return ""
    said = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({reason})"
        for reason, paths in by_reason.items()
    ]
    more = f", and more: see {_nearby(run.directory)}/run.json" if len(said) > _MOST_REASONS else ""
    shown = ", ".join(said[:_MOST_REASONS])
    return f"of job {run.job_id} ({run.name}) was not brought home: {shown}{more}"


def _nearby(path: Path) -> Path:
    """A path as seen from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    app.command("jobs")(verb(jobs_))
    app.command("logs")(verb(logs, long_file=True))
    for function in (cancel, collect):
        app.command()(verb(function))
