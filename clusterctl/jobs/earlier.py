"""Earlier runs that a job uses: find their folders here and on the cluster, and pass them to the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.errors import MachineError, SchedulerError, UsageError, printable
from clusterctl.jobs.source import field_of_run, token_of_run
from clusterctl.jobs.watch import folder_of
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import FOLDER, FROM_RUN, did_you_mean
from clusterctl.state.submissions import FROM_JOB, PROGRAM_FOLDER, RUNS, JobEntry, program_path
from clusterctl.transport.copies import Copies, record_copies
from clusterctl.transport.put import Upload
from clusterctl.transport.tree import format_size, list_items


@dataclass(frozen=True, slots=True)
class RunLocation:
    """Folders with a run's files: ``here`` on this machine, ``remote`` on the cluster. Either may be missing.

    is_folder: whether the user named a folder rather than a job.
    """

    here: Path | None
    remote: str | None
    is_folder: bool


def folder_of_run(run: str) -> Path | None:
    """Return the absolute path of the folder ``run`` or ./runs/``run``; None if neither folder exists."""
    places = (Path(os.path.abspath(path)) for path in (run, RUNS / run))  # noqa: PTH100 - gives `.` a name
    return next((path for path in places if os.path.isdir(path)), None) if run else None  # noqa: PTH112 - any name


def locate_run(run: str, entries: Sequence[JobEntry], *, former: bool = False) -> RunLocation:
    """Locate a run. Raises UsageError if it is neither a folder nor a job's id.

    run: the run's folder, the folder's name in ./runs, or a job's id; ``12_3`` is a task of an array.
    entries: the jobs submitted from this machine. former: whether it may be a job of a cluster that is down.
    """
    homes = (Path(e.run_dir) for e in entries if e.run_dir and Path(e.run_dir).name == run)
    folder = folder_of_run(run) or next((path for path in homes if path.is_dir()), None)
    if folder is not None:
        token = token_of_run(folder)
        entry = next((entry for entry in entries if entry.token == token), None)
        return RunLocation(folder, _files_of(entry), is_folder=True)
    number, _, task = run.partition("_")
    if not number.isdecimal():
        raise _no_run(run)
    entry = next((entry for entry in reversed(entries) if entry.job_id == number), None)
    top = Path(entry.run_dir) if entry and entry.run_dir else None
    if entry is None and former:
        top = _run_of_former_cluster(number)
    home = top and top.joinpath(*_inner(task))
    return RunLocation(home if home and home.is_dir() else None, _files_of(entry, task), is_folder=False)


def with_from_run(job: JobSpec, entries: Sequence[JobEntry], session: Session | None) -> tuple[JobSpec, str]:
    """Return the job; if it has ``from_run``, with the path of that run's files on the cluster as a variable.

    A run that is only on this machine is sent to the cluster. The second value is a line about it, or "".

    session: None: the path is not checked, and nothing is sent.

    Raises:
        UsageError: there is no such run, or neither the cluster nor this machine has its files.
        TransportError: the cluster can't be reached.
    """
    if job.from_run is None:
        return job, ""
    if job.bundled not in (None, "train"):
        raise UsageError(
            f"--from-run does not apply to the bundled job {job.bundled}",
            code="no-run-here",
            why="only `train` and your own programs continue an earlier run",
            fix="leave out --from-run; `--run RUN` passes a model to eval, sample, predict and export",
        )
    location = locate_run(job.from_run, entries)
    folder = location.remote if session is None else _folder_on_cluster(session, job.from_run, location)
    note = ""
    if folder is None:
        folder, note = _send(session, job.from_run, location)
    return job.model_copy(update={"env": {**job.env, FROM_RUN: folder}}), note


def _inner(task: str) -> tuple[str, ...]:
    return (f"task-{task}",) if task else ()


def _files_of(entry: JobEntry | None, task: str = "") -> str | None:
    """Return the folder of a job's program on the cluster, or of an array task's; None if it is unknown."""
    return "/".join((entry.program_dir, *_inner(task))) if entry and entry.program_dir else None


def _folder_on_cluster(session: Session, run: str, location: RunLocation) -> str | None:
    """Return the folder with a run's files that all nodes can read; None if it is missing."""
    if session.unshared_nodes:
        return None
    number, _, task = run.partition("_")
    folders = [location.remote] if location.remote else []
    if not folders and not location.is_folder:
        try:
            folder = folder_of(session, number)
        except SchedulerError as exc:
            raise UsageError(f"run {run}: {exc.what}", code=exc.code, why=exc.why, fix=exc.fix) from exc
        # Another machine has submitted the job. Earlier versions had no folder for the program's files.
        folders = ["/".join((top, *_inner(task))) for top in (f"{folder}/{PROGRAM_FOLDER}", folder)]
    for folder in folders:
        if not session.transport.run(["test", "-d", folder], check=False).rc:
            return folder
    return None


def _send(session: Session | None, run: str, location: RunLocation) -> tuple[str, str]:
    """Send a run's local folder to the cluster. Return its path there, and a line about the bytes sent."""
    here = location.here
    if here is None:
        cause = f"neither this machine nor a folder that all nodes share has {location.remote or 'them'}"
        raise UsageError(
            f"the files of run {run} are not available",
            code="run-gone",
            why=cause if session is not None else "--dry-run does not ask the cluster",
            fix=f"run `clusterctl collect {run}` first, or name the folder of a collected run",
        )
    token = next(filter(None, map(token_of_run, (here, here.parent))), None)
    if token is None:
        raise UsageError(
            f"the folder {here} is not a collected run",
            code="not-a-run",
            fix=f"send it with `clusterctl put {here}`, and pass the path to your program",
        )
    name = f"runs/{here.name}-{token}"
    if session is None:
        return f"~/{FOLDER}/{name}", ""
    folder = f"{session.facts.folder}/{name}"
    items = [item for item in list_items([here])[0] if item.path != here.name]
    items = [replace(item, path=item.path.removeprefix(f"{here.name}/")) for item in items]
    paths = [program_path(os.fsencode(item.path)) for item in items]
    items = [replace(item, path=os.fsdecode(path)) for item, path in zip(items, paths, strict=True) if path]
    for transport in (session.transport, *session.transports_of_partition(None)):
        sent = Upload(transport).into(items, folder)
        # If this machine's disk is full, `down` treats the files on the cluster as only copies.
        with suppress(MachineError):
            copies = Copies(transport.host, sent.folder, str(here), sent=True, renamed=os.fsdecode(FROM_JOB))
            record_copies(session.workspace, [copies])
    return sent.folder, f"run {printable(here.name)}: {format_size(sent.sent_bytes)} sent to {sent.folder}"


def _run_of_former_cluster(number: str) -> Path | None:
    """Return the folder of the only run in ./runs of a job with this number. Its cluster may be down."""
    folders = [path for path in RUNS.glob(f"*-{number}-*") if field_of_run(path, "job_id") == number]
    return folders[0].absolute() if len(folders) == 1 else None


def _no_run(run: str) -> UsageError:
    names = [path.name for path in RUNS.iterdir()] if RUNS.is_dir() else []
    return UsageError(
        f"there is no run {run!r}",
        code="unknown-run",
        why="it is neither a folder, nor a name below ./runs, nor a job id",
        fix=did_you_mean(run, names) or "`clusterctl jobs` lists the jobs, `clusterctl collect` copies runs",
    )
