"""Detach a cluster that others operate: remove clusterctl's folder there, the workspace here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from clusterctl.errors import (
    ClusterctlError,
    NoAnswerError,
    NotUpError,
    SchedulerError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.providers.attached import FolderEntry, SiteFolder
from clusterctl.providers.base import Provider
from clusterctl.providers.registry import provider_of
from clusterctl.runs.collect import uncollected
from clusterctl.runs.only_copies import OnlyCopies, Search
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.session import Session, connect_session
from clusterctl.state.chosen import unknown_cluster
from clusterctl.state.inventory import (
    Inventory,
    applied_spec,
    inventory_if_known,
    inventory_of,
    job_inventory,
)
from clusterctl.state.workspace import WAIT_S, Workspace, write_atomic
from clusterctl.transport.login import LOGIN_HOST
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.ssh import Connections
from clusterctl.util.progress import SILENT, Clock, Reporter

_CANCELLED_S = 120.0


@dataclass(frozen=True, slots=True)
class DetachOptions:
    """dry_run: only list. cancel: cancel active jobs. discard: delete files that exist only there.

    forget: do not connect; the folder stays there. reporter: shown the progress.
    """

    dry_run: bool = False
    cancel: bool = False
    discard: bool = False
    forget: bool = False
    wait_s: float = WAIT_S
    reporter: Reporter = SILENT


@dataclass(frozen=True, slots=True)
class DetachResult:
    """The outcome of `detach`. With ``dry_run``, nothing was removed.

    entries: those of the folder. only_there: jobs, runs and files that exist only in the folder.
    left: the folder that stays there, with ``forget``, and all that may be in it.
    """

    folder: str
    entries: tuple[FolderEntry, ...]
    only_there: OnlyCopies
    cancelled: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def detach(workspace: Workspace, options: DetachOptions) -> DetachResult:
    """Remove the folder on the cluster and the workspace. If killed, the next call continues.

    Raises:
        OnlyCopyError: jobs run, or runs or files exist only there, and the options don't allow
            their loss.
        UsageError: the cluster is not attached, or the folder's mark is not this cluster's.
        LeftoversError: some files can't be removed. TransportError: the cluster can't be reached.
    """
    # A lock leaves its file.
    if workspace.lock_holder() is None:
        _reject_unknown(workspace)
    with workspace.lock("detach", wait_s=options.wait_s, waiting=options.reporter.note):
        try:
            result = _emptied(workspace, options)
        except TransportError as exc:
            forget = "if you can't log in there any more: `clusterctl detach --forget`"
            exc.fix = "; ".join(filter(None, (exc.fix, forget)))
            raise
        if not options.dry_run:
            end_all_connections(workspace.ssh_config)
            with suppress(OSError):
                workspace.copies.unlink(missing_ok=True)
            # Without a spec, there is nothing left on the cluster, even if this removal is killed.
            workspace.spec.unlink(missing_ok=True)
            workspace.remove()
    return result


def _reject_unknown(workspace: Workspace) -> None:
    """Raise UsageError if there is no such cluster."""
    if not workspace.spec.exists() and not workspace.login.exists():
        raise unknown_cluster(workspace.root.name)


def _emptied(workspace: Workspace, options: DetachOptions) -> DetachResult:
    """Remove the folder on the cluster, or list it with ``dry_run``."""
    _reject_unknown(workspace)
    if not workspace.spec.exists():
        # A killed `attach` had not written anything on the cluster.
        return DetachResult("", (), OnlyCopies())
    provider = provider_of(applied_spec(workspace).provider)
    recorded = provider.attached_place()
    inventory = inventory_if_known(workspace) if options.forget else _recorded(workspace)
    folder = (inventory or recorded).folder
    if options.forget:
        kept = tuple(
            f"the run of {entry.shown} is not collected" for entry in uncollected(workspace)
        )
        return DetachResult(
            folder, (), OnlyCopies(runs=kept), left=(f"{recorded.login}:{folder}", *kept)
        )
    if inventory is None:
        return _unfinished(workspace, provider, folder, options)
    with connect_session(job_inventory(workspace), workspace) as session:
        place = provider.attached_folder(session.transport, folder, workspace.cluster_id())
        entries = place.entries()
        jobs = _active_jobs(session, folder)
        cancelled = _cancel(session, folder, jobs, options)
        if entries or not workspace.removing.exists():
            # Files that were sent from here, or collected, also exist here.
            search = Search(inventory, workspace, lambda _: session.transport, (), shared=True)
            copies = search.find()
            runs = uncollected(workspace)
        else:
            # A killed `detach` has removed the folder.
            copies = OnlyCopies()
            runs = ()
        only_there = OnlyCopies(
            jobs=tuple(
                f"job {job.whole_id} ({job.name}) is {job.state}" for job in jobs if not cancelled
            ),
            runs=tuple(f"the run of {entry.shown} is not collected" for entry in runs),
            files=tuple(
                copy for copy in copies.files if copy.job_id not in {run.job_id for run in runs}
            ),
            unknown=copies.unknown,
        )
        if only_there and not options.dry_run and not (options.discard and not only_there.jobs):
            raise only_there.error(
                f"cluster {workspace.root.name!r} was not detached: it has the only copy of jobs "
                "or files",
                fix="`clusterctl collect --all` brings runs and files home; --cancel cancels jobs, "
                "--discard deletes the rest",
            )
        if not options.dry_run:
            options.reporter.step("remove")
            _remove(place, workspace)
    return DetachResult(folder, entries, only_there, cancelled)


def _remove(place: SiteFolder, workspace: Workspace) -> None:
    write_atomic(workspace.removing, "")
    try:
        place.remove()
    except ClusterctlError as exc:
        # Without an answer, the folder may be gone. Otherwise, the cluster stays in use.
        if not isinstance(exc, NoAnswerError | UnreachableError):
            workspace.removing.unlink()
        raise


def _recorded(workspace: Workspace) -> Inventory | None:
    """Read hosts.json; return None if `attach` has not finished. Raise UsageError if damaged."""
    with suppress(NotUpError):
        return inventory_of(workspace)
    return None


def _unfinished(
    workspace: Workspace, provider: Provider, folder: str, options: DetachOptions
) -> DetachResult:
    """Remove or list the files in the folder of an `attach` that failed or was killed.

    A folder of the user's, or of another cluster, stays as it is.
    """
    with Connections(workspace.ssh_config, stays=LOGIN_HOST) as connections:
        place = provider.attached_folder(connections.to(LOGIN_HOST), folder, workspace.cluster_id())
        try:
            entries = place.entries()
        except UsageError as exc:
            if exc.about != "foreign-folder":
                raise
            options.reporter.note(f"{folder} stays there: {exc.why}")
            return DetachResult("", (), OnlyCopies())
        # Another machine may have attached the same folder since.
        copies = OnlyCopies(
            unknown=tuple(f"{folder}/{entry}" for entry in entries if not entry.is_made_by_attach)
        )
        if copies and not options.dry_run and not options.discard:
            raise copies.error(
                f"cluster {workspace.root.name!r} was not detached: its folder has other files",
                fix="--discard deletes them",
            )
        if not options.dry_run:
            place.remove()
    return DetachResult(folder, entries, copies)


def _active_jobs(session: Session, folder: str) -> tuple[JobInfo, ...]:
    """Return the user's active jobs that clusterctl submitted, also from other machines."""
    return tuple(
        job
        for job in session.scheduler.own_jobs()
        if not job.ended and (job.token or (job.work_dir or "").startswith(f"{folder}/"))
    )


def _cancel(
    session: Session, folder: str, jobs: Sequence[JobInfo], options: DetachOptions
) -> tuple[str, ...]:
    """If the options say so, cancel jobs and wait until they no longer write to the folder."""
    ids = tuple(dict.fromkeys(job.whole_id for job in jobs))
    if not ids or not options.cancel or options.dry_run:
        return ()
    options.reporter.note(f"cancelling {', '.join(ids)}")
    session.scheduler.cancel(ids)
    for _ in Clock().polls(_CANCELLED_S, first_s=1.0):
        if not _active_jobs(session, folder):
            return ids
    raise SchedulerError(
        f"these jobs have not ended yet: {', '.join(ids)}",
        code="not-ended",
        about="jobs",
        why=f"they were cancelled {_CANCELLED_S:g} s ago",
        fix="run the same command again",
    )
