"""Look for what exists only on hosts before they are removed: refuse to remove it, or note what is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.cluster.phases import Outcome, PhaseRunner
from clusterctl.errors import ClusterctlError, MachineError, SchedulerError, TransportError, UsageError
from clusterctl.providers.base import HostPlan
from clusterctl.runs.collect import uncollected
from clusterctl.runs.only_copies import NOTHING, OnlyCopies, Search, search_all
from clusterctl.scheduler.admin import scheduler_of
from clusterctl.scheduler.base import Jobs, active_jobs
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.state.inventory import Inventory, applied_spec, inventory_of, keeps_storage
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import Connect
from clusterctl.transport.ssh import Connections
from clusterctl.util.disk import append_line, read_rows
from clusterctl.util.process import on_each

if TYPE_CHECKING:
    from clusterctl.cluster.context import ClusterContext

# In the folder of the workspaces, because the journal is removed with its workspace.
DISCARDED = "discarded.jsonl"
# Later, hosts may be silent for another reason, and have new files.
LOOK_VALID_S = 3600.0


def look(runner: PhaseRunner, discarded: Collection[JobEntry], *, discard: bool) -> Outcome[OnlyCopies]:
    """Find what exists only on the cluster, before it is removed.

    discarded: the jobs whose runs are given up; they stop nothing, and their runs are in the result.
    discard: lose all that is found.

    Raises:
        OnlyCopyError: something exists only there, and ``discard`` is false; one failure each.
    """
    workspace = runner.workspace
    ids = {entry.job_id for entry in discarded if entry.job_id}
    found = find_only_copies(workspace, ids)
    if not found.unknown:  # all hosts answer: an earlier `down` has removed nothing
        workspace.removing.unlink(missing_ok=True)
    elif _has_just_looked(workspace):
        found = replace(found, unknown=())
    lost = replace(found, runs=tuple(f"the run of {entry.shown}" for entry in discarded))
    if found and not discard:
        what = f"the cluster stays up: this exists only on {workspace.root.name!r}"
        raise found.error(what, fix=_fix(found, repair="`clusterctl up`", keep=_how_to_keep(workspace)))
    return Outcome(lost, _summary(lost))


def find_only_copies(workspace: Workspace, discarded: Collection[str]) -> OnlyCopies:
    """Look for jobs that wait or run, and for files, but for those of the ``discarded`` jobs.

    Machines of the user's own keep their files: unanswered questions are no reason to stay.
    """
    if not workspace.configured.exists():  # no user could log in yet
        return NOTHING
    try:
        inventory = inventory_of(workspace)
    except UsageError as exc:
        return OnlyCopies(unknown=(exc.cause,))
    with Connections(workspace.ssh_config) as connections:
        shared = not keeps_storage(workspace)
        found = search_all(inventory, workspace, connections.to, shared=shared).find()
        files = tuple(one for one in found.files if one.job_id is None or one.job_id not in discarded)
        jobs, unknown = _jobs(inventory, connections.to, discarded)
    unknown = () if inventory.traits.user_owned else found.unknown or unknown
    return OnlyCopies(jobs, files=files, unknown=unknown)


def _jobs(
    inventory: Inventory, to: Connect, discarded: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The jobs that wait or run, in words; and why they can't be told."""
    try:
        found = active_jobs(scheduler_of(inventory, to, patience_s=SHORT_PATIENCE_S))
    except (SchedulerError, TransportError) as exc:
        return (), (f"which jobs wait or run can't be told: {exc.cause}",)
    lines = (
        f"job {job.id} ({job.name}) of {job.user} is {job.state.value}"
        for job in found
        if job.whole_id not in discarded
    )
    return tuple(lines), ()


@dataclass(frozen=True, slots=True)
class LeavingHosts:
    """The hosts of an inventory that a plan removes or makes anew.

    replaced: hosts of the user's own that are other machines now.
    """

    before: Inventory
    planned: HostPlan
    replaced: Collection[str] = ()

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.planned.changes if one.action in {"remove", "replace"}}

    def places_lost(self, *, keep: bool) -> tuple[list[str], bool]:
        """Return the hosts whose own disks are emptied, and whether the shared folder is removed.

        keep: whether the shared folder outlives the controller.
        """
        stopped = {one.name for one in self.planned.changes if one.restarts}
        emptied = {host.name for host in self.before.hosts if host.name in stopped and host.local_ssds}
        hosts = [host.name for host in self.before.hosts if host.name in self.names | emptied]
        loses_shared = self.before.controller.name in self.names and not keep
        return hosts, bool(self.planned.other_lost) or loses_shared


def look_at_leaving(
    cluster: ClusterContext, leaving: LeavingHosts, scheduler: Jobs, *, discard: bool = False
) -> Outcome[OnlyCopies]:
    """Find what exists only on hosts, and on a shared folder, that a change removes or makes anew.

    Of machines of the user's own, these are runs that are not collected, if hosts share no folder: files stay
    on such a machine, but `collect` does not find it any more.

    Raises:
        OnlyCopyError: there is something, and not ``discard``; one failure each.
    """
    found, workspace, before = NOTHING, cluster.workspace, leaving.before
    if before.traits.user_owned:
        if before.shared_folder.kind == "none":
            found = _uncollected(workspace, scheduler, {*leaving.names, *leaving.replaced})
    else:
        hosts, shared = leaving.places_lost(keep=keeps_storage(workspace))
        if hosts or shared:
            found = Search(before, workspace, cluster.connections.to, hosts, shared=shared).find()
    if found and not discard:
        raise found.error("this exists only on what the change removes: nothing was changed", fix=_fix(found))
    return Outcome(found, _summary(found))


def _uncollected(workspace: Workspace, scheduler: Jobs, names: Collection[str]) -> OnlyCopies:
    """The runs that are not collected of jobs that ran on these nodes."""
    entries = {entry.job_id: entry for entry in uncollected(workspace) if entry.job_id}
    try:
        jobs = scheduler.jobs([*entries]) if entries else ()
    except (SchedulerError, TransportError) as exc:
        return OnlyCopies(unknown=(f"whose runs are on them can't be told: {exc.cause}",))
    nodes = {job.whole_id: ", ".join(sorted({*job.nodes} & {*names})) for job in jobs}
    return OnlyCopies(
        runs=tuple(
            f"the run of {entries[job_id].shown} is not collected, and has files on {where}"
            for job_id, where in nodes.items()
            if where
        )
    )


def is_of_own_machines(workspace: Workspace) -> bool:
    """Return whether the hosts are machines of the user's own."""
    return workspace.access_config.exists()


def all_answer(workspace: Workspace) -> bool:
    """Return whether each host of the cluster answers; also if no host is known."""
    try:
        names = [host.name for host in inventory_of(workspace).hosts]
    except UsageError:
        return True
    with Connections(workspace.ssh_config) as connections:
        _, silent = on_each(names, lambda name: connections.to(name).run(["true"]))
    return not silent


def note_removal(workspace: Workspace, lost: OnlyCopies) -> None:
    """Note that the cluster is being removed, and what is lost with it, before anything is removed.

    If all hosts were looked at, the next `down` passes for some time over hosts that don't answer any more.
    """
    looked_at = None if lost.unknown else _looked_at(workspace) or time.time()
    with suppress(MachineError):
        write_atomic(workspace.removing, json.dumps({"looked_at": looked_at}))
    note_discarded(workspace, lost.lines)


def note_discarded(workspace: Workspace, lines: Sequence[str]) -> None:
    """Add a row to the record of what was lost, if anything is."""
    if lines:
        row = {"time": time.time(), "cluster": workspace.root.name, "discarded": lines}
        with suppress(ClusterctlError, OSError):
            append_line(workspace.root.parent / DISCARDED, json.dumps(row))


def _looked_at(workspace: Workspace) -> float:
    row = next(read_rows(workspace.removing), {})
    return float(row.get("looked_at") or 0.0)


def _has_just_looked(workspace: Workspace) -> bool:
    """Return whether an earlier `down` has looked at all hosts, and no job was submitted since."""
    looked_at = _looked_at(workspace)
    latest = max((entry.submitted_at for entry in Ledger(workspace.jobs).entries()), default=0.0)
    return latest < looked_at <= time.time() < looked_at + LOOK_VALID_S


def _summary(found: OnlyCopies) -> str:
    return f"discarded: {found.shown}" if found else "nothing exists only there"


def _how_to_keep(workspace: Workspace) -> str:
    """How the shared folder can outlive the cluster; "" if it does, or it is too late for that."""
    with suppress(UsageError):
        spec = applied_spec(workspace)
        if spec.storage.keep or spec.provider.keeps_from_start:
            return ""
    return "or keep the shared folder: `storage: {keep: true}` in the spec, `clusterctl up`"


def _fix(found: OnlyCopies, *, repair: str = "", keep: str = "") -> str:
    fixes = []
    if found.jobs:
        fixes.append("wait until the jobs have ended, or end them: `clusterctl cancel`")
    if found.runs:
        fixes.append("bring the runs here: `clusterctl collect`")
    if found.files:
        fixes.append("bring the files here: `clusterctl collect --all`")
        if keep and not all(one.host for one in found.files):
            fixes.append(keep)
    if found.unknown:
        fixes.append("have all hosts answer" + (f": {repair} repairs the cluster" if repair else ""))
    return "\n".join([*fixes, "or lose all of it: --discard"])
