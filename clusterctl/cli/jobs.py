"""jobs: the table of jobs, which `status` shows too, and one job in full."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import typer

from clusterctl.cli.job_table import job_table, shown_elapsed, shown_time
from clusterctl.cli.options import Options, job_ids
from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.errors import Notice, TransportError, excluded
from clusterctl.jobs.watch import diagnosis_of, known_jobs, list_jobs, reported
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.session import SOON_S, Session, open_session

_RECENT: Final = 20  # jobs that are listed, besides those that go on
_REFRESH_S: Final = 2.0
_MOST_FILES: Final = 100
_LIST: Final = f'cd -- "$1" && find . -maxdepth 2 -type f -printf "%s %P\\0" | head -z -n {_MOST_FILES}'


def jobs(
    screen: Screen,
    options: Options,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="Only these jobs; one alone in full.", autocompletion=job_ids),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"All jobs, not only the last {_RECENT} and those that go on.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show them again as they change, until Ctrl-C.")
    ] = False,
) -> None:
    """List your jobs, newest first; or show one in full.

    Lists jobs that wait or run, and those submitted from here; an array is one line. With one ID: also its
    resources, its folder and files on the cluster, where its run was collected to, and how it ended.
    """
    if watch and screen.json:
        raise excluded("--watch", "-o json")
    with open_session(options.chosen(screen), patience_s=SOON_S) as session:

        def ask() -> tuple[tuple[JobInfo, ...], int]:
            if ids:
                return known_jobs(session, ids), 0
            return list_jobs(session, None if everything else _RECENT)

        if watch:
            _watch(screen, session, lambda: ask()[0], until_ended=bool(ids))
            return
        found, older = ask()
        if ids and len({job.whole_id for job in found}) == 1:
            _show_in_full(screen, session, found)
            return
    screen.result({"jobs": [job.as_dict() for job in found]}, *job_table(screen, found))
    if older:
        screen.note(Notice("older-jobs", f"{older} older ones: `clusterctl jobs --all`"))


def _watch(
    screen: Screen, session: Session, ask: Callable[[], tuple[JobInfo, ...]], *, until_ended: bool
) -> None:
    """Show jobs again and again: drawn anew on a terminal, elsewhere a line for each that changed."""

    def rounds() -> Iterator[tuple[JobInfo, ...]]:
        while True:
            yield (found := ask())
            if until_ended and all(job.ended for job in found):
                return
            session.scheduler.clock.sleep(_REFRESH_S)

    with suppress(*ENDINGS):  # which is how it ends
        if sys.stdout.isatty():
            with screen.redrawing() as draw:
                for found in rounds():
                    draw(job_table(screen, found))
            return
        seen: dict[str, Any] = {}
        for found in rounds():
            for job in reversed(found):
                if seen.get(job.id) != reported(job):
                    seen[job.id] = reported(job)
                    screen.result({}, _in_a_line(job))


def _in_a_line(job: JobInfo) -> str:
    where = f" on {','.join(job.nodes)}" if job.nodes else ""
    code = f", exit {job.exit}" if job.exit else ""
    why = f" ({job.reason})" if job.reason else ""
    return f"job {job.id} ({job.name}) {job.state.value}{where}{code}{why}"


def _show_in_full(screen: Screen, session: Session, found: Sequence[JobInfo]) -> None:
    """One job, or all tasks of one array, whose folder is one."""
    job = found[0]
    entry = session.ledger.find(job.whole_id)
    script = f"{job.work_dir}/{session.scheduler.script_name}" if job.token else None
    files = _files(session, job) if job.token else []
    run_dir = entry.run_dir if entry is not None else None
    is_here = run_dir is not None and os.path.isdir(run_dir)  # noqa: PTH112 - no error
    cause = diagnosis_of(session, found)
    diagnosis = cause.as_dict() if cause is not None else None
    more = {"script": script, "files": files, "run_dir": run_dir, "diagnosis": diagnosis}
    rows = _rows(job) if len(found) == 1 else []
    rows += [("folder", job.work_dir), ("script", script), ("files", _shown_files(files) if script else "")]
    lacks = f"{'not here any more' if run_dir else 'not yet'}: `clusterctl collect {job.whole_id}`"
    rows += [("collected", run_dir if is_here else lacks)] if script else []
    lines = [] if len(found) == 1 else [*job_table(screen, found, tasks=True), ""]
    lines += [f"{name:<10} {value}" for name, value in rows if value]
    if cause is not None:
        lines += ["", cause.summary, *(f"| {line}" for line in cause.lines), f"fix: {cause.fix}"]
    screen.result({"jobs": [{**one.as_dict(), **more} for one in found]}, *lines)


def _rows(job: JobInfo) -> list[tuple[str, str | None]]:
    """What the scheduler says of a job."""
    limit = "no limit" if job.time_limit_s is None else f"limit {shown_elapsed(job.time_limit_s)}"
    return [
        ("job", job.id),
        ("name", job.name),
        ("user", job.user),
        ("state", job.state.value),
        ("reason", job.reason),
        ("exit", job.exit),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("nodes", ", ".join(job.nodes)),
        ("resources", job.tres),
        ("submitted", shown_time(job.submit_time)),
        ("started", shown_time(job.start_time)),
        ("ended", shown_time(job.end_time)),
        ("elapsed", f"{shown_elapsed(job.elapsed_s)}, {limit}"),
    ]


def _files(session: Session, job: JobInfo) -> list[dict[str, Any]] | None:
    """The files of a job's folder, of up to two levels; None where they can't be listed."""
    found: list[dict[str, Any]] = []
    try:
        for host, transport in session.hosts_with_files(job.nodes):
            said = transport.run(["sh", "-c", _LIST, "sh", job.work_dir], check=False).stdout
            for size, _, path in (line.partition(" ") for line in said.split("\0")[:-1]):
                found.append({"path": path, "bytes": int(size), "host": host})
    except (TransportError, ValueError):  # how the job is was what was asked for
        return None
    return sorted(found, key=lambda file: (file["path"], file["host"]))


def _shown_files(files: Sequence[dict[str, Any]] | None) -> str:
    """Return the logs with their sizes, and how many other files there are."""
    # Only a single job is shown in full.
    from clusterctl.transport.tree import shown_size

    if files is None:
        return "they can't be listed now"
    several = len({file["host"] for file in files}) > 1
    logs = [
        f"{file['path']}{' of ' + file['host'] if several else ''} ({shown_size(file['bytes'])})"
        for file in files
        if file["path"].endswith(".log")
    ]
    others = len(files) - len(logs)
    shown = [*logs, *([f"{others} more"] if others else [])]
    return ", ".join(shown) or Notice("job-folder-empty", "none: the folder is empty, or gone")
