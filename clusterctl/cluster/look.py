"""Look for what exists only on hosts before they are removed: refuse to remove it, or note what is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from clusterctl.cluster.context import ClusterContext, Outcome, PhaseRunner
from clusterctl.errors import ClusterctlError, MachineError, SchedulerError, TransportError, UsageError
from clusterctl.providers.base import HostPlan, Provider
from clusterctl.providers.storage import REMOVE, KeptStorage
from clusterctl.runs.collect import uncollected
from clusterctl.runs.only_copies import NOTHING, Found, Search, found_on_storage
from clusterctl.scheduler.base import Scheduler, active_jobs
from clusterctl.scheduler.session import SHORT_PATIENCE_S, scheduler_of
from clusterctl.state.inventory import Inventory, applied_spec, inventory_of, keeps_storage
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace, hold, write_atomic
from clusterctl.transport.base import Connect
from clusterctl.transport.connections import Connections
from clusterctl.transport.copies import read_copies
from clusterctl.util.disk import read_rows
from clusterctl.util.process import on_each

DISCARDED = "discarded.jsonl"  # in the folder of the workspaces, as the journal is removed with its workspace
_COPY = "copy what you need from there"  # homes on machines of the user's own: nothing brings them here
LOOK_VALID_S = 3600.0  # later, hosts may be silent for another reason, and have new files


def look(
    runner: PhaseRunner,
    discarded: Collection[JobEntry],
    *,
    discard: bool,
    storage: bool = False,
    kept: Found = NOTHING,
) -> Outcome[Found]:
    """Find what exists only on the cluster, but for the ``discarded`` jobs, before it is removed.

    Of machines of the user's own that is jobs alone: their files stay where they are. With ``storage``, what
    is on the shared folder counts in any case, and what is on ``kept`` storage beside it.

    Raises:
        OnlyCopyError: there is something, and not ``discard``; one failure each.
    """
    workspace = runner.workspace
    ids = {entry.job_id for entry in discarded if entry.job_id}  # what is in no job's folder has None, too
    found, complete = _found(workspace, ids, storage=storage)
    kept_until_now = storage and keeps_storage(workspace, if_damaged=True)  # nobody has looked there before
    if complete:  # an earlier `down` has removed nothing
        clear_removal(workspace)
    elif _has_just_looked(workspace) and not kept_until_now:  # at what is gone by now
        found = replace(found, unknown=())
    fix = _fix(
        found,
        all_of_it=True,
        keep=_how_to_keep(workspace, storage=storage),
        beside=bool(kept),
        user_owned=is_of_own_machines(workspace),
    )
    found = replace(found, files=found.files + kept.files, unknown=found.unknown + kept.unknown)
    if found and not discard:
        name = workspace.root.name
        where = f"{name!r}, or on kept storage of that name" if kept else repr(name)
        raise found.error(f"the cluster stays up: this exists only on {where}", fix=fix)
    return Outcome(found, _summary(found))


def is_of_own_machines(workspace: Workspace) -> bool:
    """Whether what stands in it is of machines of the user's own."""
    return workspace.access_config.exists()


def all_answer(workspace: Workspace) -> bool:
    """Whether each host of the cluster still can be looked at; also if nobody knows of any."""
    try:
        names = [host.name for host in inventory_of(workspace).hosts]
    except UsageError:
        return True
    with Connections(workspace.ssh_config) as connections:
        _, silent = on_each(names, lambda name: connections.to(name).run(["true"]))
    return not silent


def note_removal(workspace: Workspace, discarded: Sequence[str], *, looked: bool) -> None:
    """Note that the cluster is being removed, and what is ``discarded``, before anything is.

    Only if all hosts were ``looked`` at, a `down` soon after passes over those that don't answer any more.
    What an earlier one was to discard, which did not end, is in the same row. A full disk takes no note.
    """
    begun, now = _begun(workspace), time.time()
    since = begun.get("since", now)
    looked_at = (begun.get("looked_at") or now) if looked else None  # a second `down` has not looked again
    with suppress(MachineError):
        write_atomic(workspace.removing, json.dumps({"since": since, "looked_at": looked_at}))
    note_discarded(workspace, discarded, since=since)


def clear_removal(workspace: Workspace) -> None:
    """Forget the note: nothing was removed."""
    if since := _begun(workspace).get("since"):
        note_discarded(workspace, None, since=since)
    with suppress(OSError):
        workspace.removing.unlink(missing_ok=True)


def note_storage_stays(workspace: Workspace, discarded: Sequence[str]) -> None:
    """Note that the hosts are gone with what is ``discarded``, but not the storage that was to go, too."""
    if since := _begun(workspace).get("since"):
        note_discarded(workspace, None, since=since)
        note_discarded(workspace, discarded, since=since)


def _begun(workspace: Workspace) -> dict[str, Any]:
    return next(read_rows(workspace.removing), {})


def _has_just_looked(workspace: Workspace) -> bool:
    """Whether an earlier `down` has looked at all hosts, and no job was submitted since."""
    looked_at = _begun(workspace).get("looked_at") or 0.0
    latest = max((entry.submitted_at for entry in Ledger(workspace.jobs).entries()), default=0.0)
    return latest < looked_at <= time.time() < looked_at + LOOK_VALID_S


def note_discarded(workspace: Workspace, lines: Sequence[str] | None, *, since: float) -> None:
    """Put lines into the row of the removal of that time, beside what it has; None: remove the row."""
    name, file = workspace.root.name, workspace.root.parent / DISCARDED
    lock = file.parent / f".{DISCARDED}.lock"
    with suppress(ClusterctlError, OSError), hold(lock, "down", what=DISCARDED, waiting=lambda _: None):
        rows = [*read_rows(file)]
        of_this = [row for row in rows if (row.get("cluster"), row.get("time")) == (name, since)]
        others = [row for row in rows if row not in of_this]
        if lines is not None:
            # By its place: else a file would be there twice, with its ages.
            told = {line.partition(": ")[0] for line in lines}
            before = [line for row in of_this for line in row.get("discarded", ())]
            lines = [*(line for line in before if line.partition(": ")[0] not in told), *lines]
        kept = [*others, *([{"time": since, "cluster": name, "discarded": lines}] if lines else [])]
        if kept != rows:
            write_atomic(file, "".join(f"{json.dumps(row)}\n" for row in kept))


def look_at_storage(provider: Provider, workspace: Workspace, storage: Iterable[KeptStorage]) -> Found:
    """Find what exists only on storage that was kept when its cluster went down."""
    found = Found()
    for one in storage:
        # Walks through all that is here, if the provider asks.
        known = (number for copies in read_copies(workspace) for number in copies.numbers())
        rows = provider.files_of_storage(one, known=known)
        there = found_on_storage(rows or ())
        closed = (f"{one.dated}: what is on it can be told only while a cluster has it",) * (rows is None)
        found = Found(found.files + there.files, unknown=found.unknown + there.unknown + closed)
    return found


def reject_lost_storage(found: Found, name: str, *, user_owned: bool) -> None:
    """Raise OnlyCopyError where something exists only on kept storage, or may."""
    if found:
        up, then = "`clusterctl up` with `storage: {keep: true}`", f"`{REMOVE.format(name=name)}`"
        bring = f"bring it here: {up}, `clusterctl collect --all`, {then}"
        raise found.error(
            f"the kept storage of cluster {name!r} stays: this may exist only there",
            fix=f"{_COPY if user_owned else bring}\nor lose all of it: --discard",
        )


def look_at_leaving(
    cluster: ClusterContext,
    before: Inventory,
    planned: HostPlan,
    scheduler: Scheduler,
    *,
    replaced: Collection[str] = (),
    discard: bool = False,
) -> Outcome[Found]:
    """Find what exists only on hosts, and on a shared folder, that a change removes or makes anew.

    Of machines of the user's own, ``replaced`` ones too, these are runs that are not collected, where hosts
    share no folder: files stay on such a machine, but `collect` does not find it any more.

    Raises:
        OnlyCopyError: there is something, and not ``discard``; one failure each.
    """
    gone = {one.name for one in planned.changes if one.action in {"remove", "replace"}}
    stopped = {one.name for one in planned.changes if one.restarts}
    found = Found()
    if before.traits.user_owned:
        if before.shared_folder.kind == "none":
            found = _uncollected(cluster.workspace, scheduler, gone | {*replaced})
    else:
        emptied = {host.name for host in before.hosts if host.name in stopped and host.local_ssds}
        names = [host.name for host in before.hosts if host.name in gone | emptied]
        on_controller = before.controller.name in gone and not keeps_storage(cluster.workspace)
        shared = bool(planned.other_lost) or on_controller
        if names or shared:
            found = Search(before, cluster.workspace, cluster.connections.to, names, shared).find()
    if found and not discard:
        raise found.error("this exists only on what the change removes: nothing was changed", fix=_fix(found))
    return Outcome(found, _summary(found))


def _summary(found: Found) -> str:
    return f"discarded: {found.shown}" if found else "nothing exists only there"


def _uncollected(workspace: Workspace, scheduler: Scheduler, names: Collection[str]) -> Found:
    """The runs that are not collected of jobs that ran on these nodes."""
    entries = {entry.job_id: entry for entry in uncollected(workspace) if entry.job_id}
    try:
        jobs = scheduler.jobs([*entries]) if entries else ()
    except (SchedulerError, TransportError) as exc:
        return Found(unknown=(f"whose runs are on them can't be told: {exc.cause}",))
    there = {
        job.whole_id: ", ".join(sorted({*job.nodes} & {*names})) for job in jobs if {*job.nodes} & {*names}
    }
    return Found(
        runs=tuple(
            f"the run of {entries[job_id].shown} is not collected, and has files on {where}"
            for job_id, where in there.items()
        )
    )


def _found(workspace: Workspace, discarded: Collection[str], *, storage: bool) -> tuple[Found, bool]:
    """What exists only there; and whether all could be told."""
    is_up = workspace.configured.exists() and not workspace.removing.exists()
    if storage and not is_up and keeps_storage(workspace, if_damaged=True):
        why = "what is on the shared folder can't be told: the last `up` or `down` has not ended"
        return Found(unknown=(why,)), False
    if not workspace.configured.exists():  # no user could log in yet
        return Found(), True
    try:
        inventory = inventory_of(workspace)
    except UsageError as exc:
        return Found(unknown=(exc.cause,)), False
    with Connections(workspace.ssh_config) as connections:
        found = Search.of_all(inventory, workspace, connections.to, kept_too=storage).find()
        files = tuple(one for one in found.files if one.job_id not in discarded)
        jobs, unknown = _jobs(inventory, connections.to, discarded)
    unknown = found.unknown or unknown
    # Of machines of the user's own nothing is destroyed: that jobs can't be told is no reason to stay.
    reasons = () if inventory.traits.user_owned and not storage else unknown
    return Found(files, jobs, unknown=reasons), not unknown


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


def _how_to_keep(workspace: Workspace, *, storage: bool) -> str:
    """What to do so that the shared folder outlives the cluster; "" where it is too late for that."""
    if keeps_storage(workspace):
        return "or keep the shared folder: leave out --storage"
    with suppress(UsageError):
        if applied_spec(workspace).provider.keeps_from_start:
            return ""
    more = ", without --storage" if storage else ""
    return "or keep the shared folder: `storage: {keep: true}` in the spec, `clusterctl up`" + more


def _fix(
    found: Found,
    *,
    all_of_it: bool = False,
    keep: str = "",
    beside: bool = False,
    user_owned: bool = False,
) -> str:
    fixes = []
    if found.jobs:
        fixes.append("wait until the jobs have ended, or end them: `clusterctl cancel`")
    if found.runs:
        fixes.append("bring the runs here: `clusterctl collect`")
    if found.files:
        fixes.append(_COPY if user_owned else "bring the files here: `clusterctl collect --all`")
        if keep and not all(one.host for one in found.files):
            fixes.append(keep)
    if found.unknown:
        fixes.append("have all hosts answer" + (": `clusterctl up` repairs the cluster" if all_of_it else ""))
    if beside:
        up = "then `clusterctl up` with `storage: {keep: true}` and `clusterctl collect --all` bring it here"
        fixes.append(f"leave the kept storage: `clusterctl down` without --storage; {up}")
    return "\n".join([*fixes, "or lose all of it: --discard"])
