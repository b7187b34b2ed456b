"""status, jobs: nodes and jobs as they are, and one job in full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Final

from clusterctl.cli.options import Words, argument, job_ids, option
from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.cluster.status import Status, status_of
from clusterctl.errors import Notice, TransportError, excluded
from clusterctl.jobs.watch import diagnosis_of, known_jobs, list_jobs, reported
from clusterctl.scheduler.base import JobInfo, JobState, state_counts, worst
from clusterctl.scheduler.session import SOON_S, Session, open_session
from clusterctl.scheduler.slurm_parse import fold_nodes
from clusterctl.spec.units import shown_memory

if TYPE_CHECKING:
    from clusterctl.providers.base import PendingRelease
    from clusterctl.scheduler.diagnosis import Diagnosis

_NONE: Final = "-"
# So many jobs get a line that tells what they wait for. As JSON, all of them do.
_MOST_WAITING: Final = 10
_RECENT: Final = 20  # jobs that are listed, besides those that go on
_REFRESH_S: Final = 2.0
_MOST_FILES: Final = 100
_LIST: Final = f'cd -- "$1" && find . -maxdepth 2 -type f -printf "%s %P\\0" | head -z -n {_MOST_FILES}'


def status(screen: Screen) -> None:
    """Show the state of nodes and jobs."""
    workspace = screen.chosen().workspace()
    found = status_of(workspace)
    waits: list[Diagnosis] = []
    if any(job.state is JobState.PENDING for job in found.jobs):
        # The catalogue of causes takes a while to read.
        from clusterctl.scheduler.diagnosis import waiting

        waits = waiting(found.jobs)
    releases: tuple[PendingRelease, ...] = ()
    if workspace.releases.exists():
        # Only machines of the user's own are released.
        from clusterctl.providers.base import pending_releases

        releases = pending_releases(workspace)
    answer = {
        "cluster": found.cluster,
        "provider": found.provider,
        "ready": found.ready,
        "nodes": [
            {key: getattr(node, key) for key in ("name", "cpus", "memory_mib", "reason")}
            | {"state": node.shown}
            for node in found.nodes
        ],
        "jobs": [job.as_dict() for job in found.jobs],
        "waiting": [diagnosis.as_dict() for diagnosis in waits],
        "auto_down": found.auto_down,
        "pending_releases": [release.as_dict() for release in releases],
    }
    # A table of many jobs takes as long as the scheduler's answer.
    lines = [] if screen.json else _lines(screen, found, waits, releases)
    screen.result(answer, *lines)


def _lines(
    screen: Screen, found: Status, waits: Sequence[Diagnosis], releases: Sequence[PendingRelease]
) -> list[str]:
    lines = [f"cluster {found.cluster} ({found.provider}): {'ready' if found.ready else 'NOT ready'}", ""]
    rows = [(n.name, n.shown, n.cpus, shown_memory(n.memory_mib), n.reason) for n in found.nodes]
    lines += screen.table(["NODE", "STATE", "CPUS", "MEMORY", "REASON"], rows)
    if found.jobs:
        lines += ["", *job_table(screen, found.jobs, users=True)]
        lines += ["", *(diagnosis.summary for diagnosis in waits[:_MOST_WAITING])] if waits else []
    if auto_down := found.auto_down:
        state = "" if auto_down["armed"] else ", but its timer does not run: `clusterctl up` starts it"
        lines += ["", f"an idle cluster takes itself down after {auto_down['after']}{state}"]
    for release in releases:
        lines += ["", str(release), f"  {release.fix}"]
    return lines


def jobs(
    screen: Screen,
    ids: Annotated[
        Words, argument("Only these jobs; one alone in full.", metavar="[ID...]", tab=job_ids)
    ] = None,
    everything: Annotated[
        bool, option(f"All jobs, not only the last {_RECENT} and those that go on.", "--all")
    ] = False,
    watch: Annotated[bool, option("Show them again as they change, until Ctrl-C.")] = False,
) -> None:
    """List your jobs, newest first; or show one in full.

    Lists jobs that wait or run, and those submitted from here; an array is one line. With one ID: also its
    resources, its folder and files on the cluster, where its run was collected to, and how it ended.
    """
    if watch and screen.json:
        raise excluded("--watch", "-o json")
    with open_session(screen.chosen(), patience_s=SOON_S) as session:
        if watch:
            with suppress(*ENDINGS):  # which is how it ends
                _watch(screen, _rounds(session, ids, everything=everything))
            return
        found, older = _asked(session, ids, everything=everything)
        if ids and len({job.whole_id for job in found}) == 1:
            _show_in_full(screen, session, found)
            return
    screen.result({"jobs": [job.as_dict() for job in found]}, *job_table(screen, found))
    if older:
        screen.note(Notice("older-jobs", f"{older} older ones: `clusterctl jobs --all`"))


def _asked(session: Session, ids: Words, *, everything: bool) -> tuple[tuple[JobInfo, ...], int]:
    return (known_jobs(session, ids), 0) if ids else list_jobs(session, None if everything else _RECENT)


def _rounds(session: Session, ids: Words, *, everything: bool) -> Iterator[tuple[JobInfo, ...]]:
    """Yield the jobs again and again, those of ``ids`` until they have ended."""
    while True:
        yield (found := _asked(session, ids, everything=everything)[0])
        if ids and all(job.ended for job in found):
            return
        session.scheduler.clock.sleep(_REFRESH_S)


def _watch(screen: Screen, rounds: Iterator[tuple[JobInfo, ...]]) -> None:
    """Show jobs as they change: drawn anew on a terminal, elsewhere a line for each that changed."""
    if sys.stdout.isatty():
        with screen.redrawing() as draw:
            for found in rounds:
                draw(job_table(screen, found))
        return
    seen: dict[str, Any] = {}
    for found in rounds:
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
    limit = "no limit" if job.time_limit_s is None else f"limit {shown_elapsed(job.time_limit_s)}"
    said = ("name", "user", "state", "reason", "exit", "partition", "account", "qos")
    times = {"submitted": job.submit_time, "started": job.start_time, "ended": job.end_time}
    return [
        ("job", job.id),
        *((key, getattr(job, key)) for key in said),
        ("nodes", ", ".join(job.nodes)),
        ("resources", job.tres),
        *((key, shown_time(at)) for key, at in times.items()),
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
