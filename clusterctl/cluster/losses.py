"""The search for jobs and files that exist only on hosts that are about to be removed."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.cluster.phases import PhaseResult, PhaseRunner
from clusterctl.errors import (
    ClusterctlError,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.providers.base import HostPlan
from clusterctl.runs.collect import uncollected
from clusterctl.runs.only_copies import NOTHING, OnlyCopies, Search, search_all
from clusterctl.scheduler.admin import active_jobs, scheduler_of
from clusterctl.scheduler.base import JobInfo, Jobs
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.state.inventory import Inventory, inventory_of, keeps_storage
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.removal import BegunRemoval, begun_removal, record_removal
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect
from clusterctl.transport.ssh import Connections
from clusterctl.util.disk import append_line
from clusterctl.util.process import call_on_hosts

if TYPE_CHECKING:
    from clusterctl.cluster.context import ClusterContext

# This file is in the folder of all workspaces, because `down` removes the cluster's own workspace.
DISCARDED = "discarded.jsonl"
# After this time, hosts may be unreachable for another reason and hold new files.
LOOK_VALID_S = 3600.0


def check_only_copies(
    runner: PhaseRunner,
    discarded: Collection[JobEntry],
    gone: Collection[str] = (),
    *,
    discard: bool,
) -> PhaseResult[OnlyCopies]:
    """Return the jobs and files that exist only on the cluster, before `down` removes it.

    discarded: jobs that the user does not want to collect. The result lists them; they don't stop
        `down`.
    gone: names of hosts that the user owned and lost.
    discard: the user accepts all losses. If false, raise OnlyCopyError if jobs or files would be
        lost.
    """
    workspace = runner.workspace
    ids = {entry.job_id for entry in discarded if entry.job_id}
    found = find_only_copies(workspace, ids, gone)
    # If all hosts answer, an earlier `down` has removed none of them.
    if not found.unknown and not gone and not _changed_machines(workspace):
        workspace.removing.unlink(missing_ok=True)
    copies = without_known_losses(workspace, found)
    lost = replace(copies, runs=tuple(f"the run of {entry.shown}" for entry in discarded))
    if not discard:
        reject_losses(workspace, copies)
    return PhaseResult(lost, _summary(lost))


def without_known_losses(workspace: Workspace, copies: OnlyCopies) -> OnlyCopies:
    """Return the copies. If an earlier `down` has examined all hosts, or was allowed to remove the
    cluster from machines, nothing counts as unknown.
    """
    is_allowed = _checked_recently(workspace) or _changed_machines(workspace)
    return replace(copies, unknown=()) if is_allowed else copies


def reject_losses(workspace: Workspace, copies: OnlyCopies) -> None:
    """Raise OnlyCopyError if `down` would lose these copies."""
    if copies:
        message = (
            f"cluster {workspace.root.name!r} was not removed: it holds the only copy of jobs or "
            "files"
        )
        # `up` starts no machine of an owner.
        repair = "" if workspace.adopts_hosts else "`clusterctl up`"
        raise copies.error(message, fix=_fix(copies, repair=repair))


def find_only_copies(
    workspace: Workspace, discarded: Collection[str], gone: Collection[str] = ()
) -> OnlyCopies:
    """Return the waiting and running jobs of the cluster, and the files that exist only on it.

    Machines that the user owns keep their files. If their controller is among ``gone``, Slurm and its
    jobs have gone with it.
    ``discarded``: ids of jobs to leave out, with their files.
    """
    # Before the hosts were configured, no user could log in.
    if not workspace.configured.exists():
        return NOTHING
    try:
        inventory = inventory_of(workspace)
    except UsageError as exc:
        return OnlyCopies(unknown=(exc.cause,))
    if inventory.traits.adopts_hosts and inventory.controller.name in gone:
        return NOTHING
    with Connections(workspace.ssh_config, fans_out=True) as connections:
        shared = not keeps_storage(workspace)
        copies = search_all(inventory, workspace, connections.to, shared=shared).find()
        files = tuple(file for file in copies.files if file.job_id not in discarded)
        jobs, unknown = _active_jobs(inventory, connections.to, discarded)
    has_others = any(job.user != inventory.job_user for job in jobs)
    lines = tuple(f"job {job.id} ({job.name}) of {job.user} is {job.state.value}" for job in jobs)
    return OnlyCopies(
        lines,
        files=files,
        unknown=copies.unknown or unknown,
        job_ids=tuple(dict.fromkeys(job.whole_id for job in jobs)),
        has_jobs_of_others=has_others,
    )


def _active_jobs(
    inventory: Inventory, to: Connect, discarded: Collection[str]
) -> tuple[tuple[JobInfo, ...], tuple[str, ...]]:
    """Return (the waiting and running jobs, the reason if they are unknown)."""
    try:
        jobs = active_jobs(scheduler_of(inventory, to, patience_s=SHORT_PATIENCE_S))
    except (SchedulerError, TransportError) as exc:
        return (), (f"the waiting and running jobs are unknown: {exc.cause}",)
    return tuple(job for job in jobs if job.whole_id not in discarded), ()


@dataclass(frozen=True, slots=True)
class LeavingHosts:
    """The hosts that a plan removes or recreates.

    before: the inventory before the change.
    replaced: names of the user's hosts that now belong to different machines.
    """

    before: Inventory
    planned: HostPlan
    replaced: Collection[str] = ()

    @property
    def names(self) -> set[str]:
        return {
            change.name for change in self.planned.changes if change.action in {"remove", "replace"}
        }

    @property
    def emptied(self) -> list[str]:
        """The hosts that lose files. The controller, with the shared folder, always stays."""
        stopped = {change.name for change in self.planned.changes if change.stops}
        return [
            host.name
            for host in self.before.hosts
            if host.name in self.names or (host.name in stopped and host.local_ssds)
        ]


def check_leaving_hosts(
    cluster: ClusterContext, leaving: LeavingHosts, scheduler: Jobs, *, discard: bool = False
) -> PhaseResult[OnlyCopies]:
    """Find files and runs that exist only on hosts that a change removes or recreates.

    Machines that the user owns keep their files, but `collect` no longer finds the machines. So
    without a shared folder, return the runs that are only on these machines and not collected.

    discard: the user accepts all losses. If false, raise OnlyCopyError if files or runs would be
        lost.
    """
    copies = NOTHING
    workspace = cluster.workspace
    inventory = leaving.before
    if inventory.traits.adopts_hosts:
        if inventory.shared_folder.kind == "none":
            copies = _uncollected_runs(workspace, scheduler, {*leaving.names, *leaving.replaced})
    elif hosts := leaving.emptied:
        to = cluster.connections.to
        copies = Search(inventory, workspace, to, hosts, shared=False).find()
    if copies and not discard:
        message = "nothing was changed: the hosts to be removed hold the only copy of runs or files"
        raise copies.error(message, fix=_fix(copies))
    return PhaseResult(copies, _summary(copies))


def _uncollected_runs(workspace: Workspace, scheduler: Jobs, names: Collection[str]) -> OnlyCopies:
    entries = {entry.job_id: entry for entry in uncollected(workspace) if entry.job_id}
    try:
        jobs = scheduler.jobs([*entries]) if entries else ()
    except (SchedulerError, TransportError) as exc:
        return OnlyCopies(unknown=(f"the runs on these hosts are unknown: {exc.cause}",))
    nodes = {job.whole_id: ", ".join(sorted({*job.nodes} & {*names})) for job in jobs}
    return OnlyCopies(
        runs=tuple(
            f"the run of {entries[job_id].shown} is not collected, and has files on {node_names}"
            for job_id, node_names in nodes.items()
            if node_names
        )
    )


def is_whole(workspace: Workspace) -> bool:
    """Return whether `down` has removed nothing: it has changed no machine of an owner, and every host
    answers. True if the cluster has no known host.
    """
    if _changed_machines(workspace):
        return False
    try:
        names = [host.name for host in inventory_of(workspace).hosts]
    except UsageError:
        return True
    with Connections(workspace.ssh_config, fans_out=True) as connections:
        _, silent = call_on_hosts(names, lambda name: connections.to(name).run(["true"]))
    return not silent


def _changed_machines(workspace: Workspace) -> Collection[str]:
    begun = begun_removal(workspace)
    return begun.changed if begun else ()


def note_removal(
    workspace: Workspace, lost: OnlyCopies, discarded: Collection[JobEntry] = ()
) -> None:
    """Record, before the removal, that the cluster is being removed, and the data that may be lost.

    discarded: the submissions with runs to delete instead of collect. The next `down` does not ask
        about them again. It asks about other files and jobs, because users may have made them
        since. If all hosts could be searched for files, another `down` within an hour works even
        if hosts don't answer.
    """
    begun = begun_removal(workspace) or BegunRemoval()
    looked_at = None if lost.unknown else begun.looked_at or time.time()
    tokens = tuple(entry.token for entry in discarded)
    record_removal(workspace, replace(begun, looked_at=looked_at, discarded=tokens))
    note_discarded(workspace, lost.lines)


def note_discarded(workspace: Workspace, lines: Sequence[str]) -> None:
    """Append lines about lost runs and files to their record. Without lines, write nothing."""
    if lines:
        row = {"time": time.time(), "cluster": workspace.root.name, "discarded": lines}
        with suppress(ClusterctlError, OSError):
            workspace.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append_line(workspace.root.parent / DISCARDED, json.dumps(row))


def _checked_recently(workspace: Workspace) -> bool:
    """Return whether a `down` searched all hosts recently, and no job was submitted since."""
    begun = begun_removal(workspace)
    looked_at = (begun and begun.looked_at) or 0.0
    return _last_submission(workspace) < looked_at <= time.time() < looked_at + LOOK_VALID_S


def _last_submission(workspace: Workspace) -> float:
    return max((entry.submitted_at for entry in Ledger(workspace.jobs).entries()), default=0.0)


def _summary(copies: OnlyCopies) -> str:
    return f"discarded: {copies.shown}" if copies else "nothing would be lost"


def _fix(copies: OnlyCopies, *, repair: str = "") -> str:
    fixes = []
    if copies.jobs:
        fixes.append("wait until the jobs have ended, or cancel them: `clusterctl cancel ID`")
        if copies.has_jobs_of_others:
            fixes[-1] += ", those of other users with `clusterctl ssh --admin -- sudo scancel ID`"
    if copies.runs:
        fixes.append("collect the runs: `clusterctl collect`")
    if copies.files:
        fixes.append("collect the files: `clusterctl collect --all`")
    if copies.unknown:
        fixes.append(
            "make all hosts reachable" + (f": {repair} repairs the cluster" if repair else "")
        )
    return "\n".join([*fixes, "or pass --discard to delete the jobs and files"])
