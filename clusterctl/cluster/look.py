"""Look for what exists only on hosts that are about to be removed, and refuse to remove it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from clusterctl.cluster.session import PhaseRunner
from clusterctl.errors import SchedulerError, TransportError, UsageError
from clusterctl.runs.only_copies import Found, Search
from clusterctl.scheduler.base import active_jobs
from clusterctl.scheduler.session import scheduler_of
from clusterctl.state.inventory import Inventory, inventory_of
from clusterctl.state.ledger import JobEntry
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect
from clusterctl.transport.ssh import Connections

PATIENCE_S = 5.0  # for the scheduler to answer


def look(
    runner: PhaseRunner, given_up: Collection[JobEntry], *, discard: bool, storage: bool = False
) -> Found:
    """Find what exists only on the cluster, but for the jobs that are ``given_up``, before it is removed.

    Of machines of the user's own that is jobs alone: their files stay where they are. With ``storage``, what
    is on storage that is kept counts, too.

    Raises:
        OnlyCopyError: there is something, and not ``discard``; one failure each.
    """
    workspace = runner.workspace
    found = _found(workspace, {entry.job_id for entry in given_up}, storage=storage)
    if workspace.removing.exists():  # it was looked for before; hosts that are gone by now can't be asked
        found = replace(found, unknown=())
    runner.note = f"discarded: {found.shown}" if found else "nothing exists only there"
    if found and not discard:
        name = workspace.root.name
        raise found.error(
            f"the cluster stays up: this exists only on {name!r}", fix=_fix(found, "clusterctl down")
        )
    return found


def _found(workspace: Workspace, given_up: Collection[str | None], *, storage: bool) -> Found:
    if not workspace.configured.exists():  # no user could log in yet
        return Found()
    try:
        inventory = inventory_of(workspace)
    except UsageError as exc:
        return Found(unknown=(exc.cause,)) if workspace.inventory.exists() else Found()
    with Connections(workspace.ssh_config) as connections:
        found = Search.of_all(inventory, workspace, connections.to, kept_too=storage).find()
        files = tuple(one for one in found.files if one.job_id not in given_up)
        jobs, unknown = _jobs(inventory, connections.to, given_up)
    # Of machines of the user's own nothing is destroyed: that jobs can't be told is no reason to stay.
    unknown = () if inventory.traits.user_owned else found.unknown or unknown
    return Found(files, jobs, unknown)


def _jobs(
    inventory: Inventory, to: Connect, given_up: Collection[str | None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The jobs that wait or run, in words; and why they can't be told."""
    try:
        found = active_jobs(scheduler_of(inventory, to, patience_s=PATIENCE_S))
    except (SchedulerError, TransportError) as exc:
        return (), (f"which jobs wait or run can't be told: {exc.cause}",)
    lines = (
        f"job {job.id} ({job.name}) of {job.user} is {job.state.value}"
        for job in found
        if job.whole_id not in given_up
    )
    return tuple(lines), ()


def _fix(found: Found, verb: str) -> str:
    fixes = []
    if found.jobs:
        fixes.append("wait until the jobs have ended, or end them: `clusterctl cancel`")
    if found.files:
        fixes.append("bring the files here: `clusterctl collect --all`")
        if not all(one.host for one in found.files):
            fixes.append("or keep the shared folder: `storage: {keep: true}` in the spec, `clusterctl up`")
    if found.unknown:
        fixes.append("have all hosts answer: `clusterctl up` repairs the cluster")
    return "\n".join([*fixes, f"or lose all of it: `{verb} --discard`"])
