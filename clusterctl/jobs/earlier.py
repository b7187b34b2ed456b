"""Earlier runs that a job uses: find their folders here and on the cluster, pass them on."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from clusterctl.errors import MachineError, UsageError, printable
from clusterctl.jobs.watch import folder_of
from clusterctl.scheduler.base import refusing_wrong_ids
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites.site import Site
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import AFTER, FOLDER, FROM_RUN, first_few
from clusterctl.spec.remote_folders import RUNS
from clusterctl.spec.sbatch import SINGLETON
from clusterctl.state.ledger import FROM_JOB, PROGRAM_FOLDER, program_path
from clusterctl.state.run_names import NamedRun, find_run
from clusterctl.transport.copies import LocalCopies, record_copies
from clusterctl.transport.put import Upload
from clusterctl.transport.tree import list_items
from clusterctl.util import formatting


def with_from_run(job: JobSpec, cluster: str, session: Session | None) -> tuple[JobSpec, str]:
    """Return the job; if it has ``from_run``, with the path of that run's files on the cluster as a
    variable.

    A run that is only on this machine is sent to the cluster. The second value is a line about it,
    or "".

    cluster: where the job will run. session: None: the path is not checked, and nothing is sent.

    Raises:
        UsageError: there is no such run, or neither the cluster nor this machine has its files.
        TransportError: the cluster can't be reached.
    """
    if job.from_run is None:
        return job, ""
    if job.bundled not in (None, "train"):
        raise UsageError(
            f"--from-run does not apply to the bundled job {job.bundled}",
            about="from-run",
            why="only `train` and your own programs continue an earlier run",
            fix="leave out --from-run; `--run RUN` passes a model to eval, sample, predict and "
            "export",
        )
    run = find_run(job.from_run)
    folder = run.remote_on(cluster) if session is None else _folder_on_cluster(session, run)
    note = ""
    if folder is None:
        folder, note = _send(session, run, cluster)
    return job.model_copy(update={"env": {**job.env, FROM_RUN: folder}}), note


def with_after(job: JobSpec, site: Site, cluster: str) -> tuple[JobSpec, str]:
    """Return the job with a variable for each job that ``after`` names: the path of that job's files on
    the cluster. The second value is a line about those without a variable, or "".

    The variables have the numbers of the jobs in ``after``, from 1, without `singleton`.
    cluster: where the job will run.
    """
    ids = [entry.partition(":")[0] for entry in job.after if entry != SINGLETON]
    folders = [find_run(f"{cluster}/{job_id}").remote_on(cluster) for job_id in ids]
    if not site.folders.are_one:
        folders = [None] * len(ids)
    variables = {
        f"{AFTER}{number}": folder for number, folder in enumerate(folders, 1) if folder is not None
    }
    note = ""
    if missing := [job_id for job_id, folder in zip(ids, folders, strict=True) if folder is None]:
        reason = (
            f"this machine did not submit job {first_few(missing)}"
            if site.folders.are_one
            else "the nodes share no folder"
        )
        note = f"{job.name}: no variable has the path of its files, because {reason}"
    return job.model_copy(update={"env": {**job.env, **variables}}) if variables else job, note


def folders_on_cluster(session: Session, run: NamedRun) -> list[str]:
    """Return the folders in the cluster's shared folder that may have a run's files.

    Another machine may have submitted the job, which the cluster then knows. Raises UsageError if
    not.
    """
    cluster = session.ledger.cluster
    if not session.site.folders.are_one:
        return []
    if (remote := run.remote_on(cluster)) or run.run_folder or run.cluster != cluster:
        return [remote] if remote else []
    with refusing_wrong_ids(f"run {run.name}"):
        folder = folder_of(session, run.job_id)
    # Earlier versions had no folder for the program's files.
    return [run.below(top) for top in (f"{folder}/{PROGRAM_FOLDER}", folder)]


def _folder_on_cluster(session: Session, run: NamedRun) -> str | None:
    """Return the folder with a run's files that all nodes can read; None if it is missing."""
    exists = (
        (folder, session.transport.run(["test", "-d", folder], check=False).rc == 0)
        for folder in folders_on_cluster(session, run)
    )
    return next((folder for folder, is_there in exists if is_there), None)


def _send(session: Session | None, run: NamedRun, cluster: str) -> tuple[str, str]:
    """Send a run's local folder to the cluster. Return its path there, and a line about the bytes
    sent.
    """
    here = run.folder
    token = run.token
    if here is None:
        where = run.remote_on(cluster) or "them"
        cause = f"neither this machine nor a folder that all nodes share has {where}"
        raise UsageError(
            f"the files of run {run.name} are not available",
            code="not-found",
            about="run-files",
            why=cause if session is not None else "--dry-run does not ask the cluster",
            fix=f"run `clusterctl collect {run.full_name}` first, or name the folder of a "
            "collected run",
        )
    if not token:
        raise UsageError(
            f"the folder {here} is not a collected run",
            code="file-invalid",
            about="run",
            fix=f"send it with `clusterctl put {here}`, and pass the path to your program",
        )
    name = f"{RUNS}/{here.name}-{token}"
    if session is None:
        return f"~/{FOLDER}/{name}", ""
    folder = f"{session.inventory.folder}/{name}"
    items = [item for item in list_items([here])[0] if item.path != here.name]
    items = [replace(item, path=item.path.removeprefix(f"{here.name}/")) for item in items]
    paths = [program_path(os.fsencode(item.path)) for item in items]
    items = [
        replace(item, path=os.fsdecode(path))
        for item, path in zip(items, paths, strict=True)
        if path
    ]
    for transport in (session.transport, *session.transports_of_partition(None)):
        sent = Upload(transport).into(items, folder)
        # If this machine's disk is full, `down` treats the files on the cluster as only copies.
        with suppress(MachineError):
            copies = LocalCopies(
                transport.host, sent.folder, str(here), sent=True, renamed=os.fsdecode(FROM_JOB)
            )
            record_copies(session.workspace, [copies])
    return (
        sent.folder,
        f"run {printable(here.name)}: {formatting.size(sent.sent_bytes)} sent to {sent.folder}",
    )
