"""What `up` would do, found out by looking alone: to the hosts, to their configuration, and to jobs.

The spec is compared with the cluster as it was raised, and with its live hosts. Nothing is written: a
provider gets a copy of the workspace to plan in.

Slurm ends the jobs of a node whose number of CPUs changes, in either direction. So a node at work keeps the
size that it has where the spec leaves that to us; where the spec itself says another, the change is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from clusterctl.cluster import converge, verify
from clusterctl.cluster.hardware import without_cgroups
from clusterctl.cluster.look import look_at_leaving
from clusterctl.cluster.node_class import class_ahead
from clusterctl.cluster.nodes import REASON, drain_usable
from clusterctl.cluster.session import ClusterSession, Drift, workspace_copy
from clusterctl.configure import ansible
from clusterctl.configure.events import TaskProgress
from clusterctl.errors import (
    ClusterctlError,
    ConfigureError,
    MachineError,
    Notice,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.hosts.probe import probe_hosts
from clusterctl.hosts.roles import probe_requests
from clusterctl.jobs.environment import unbuilt
from clusterctl.providers.base import HostChange, HostPlan, Size
from clusterctl.providers.storage import storage_left_alone
from clusterctl.scheduler.base import JobInfo, NodeInfo, Scheduler, active_jobs
from clusterctl.scheduler.session import SHORT_PATIENCE_S, scheduler_of
from clusterctl.spec.common import Partition
from clusterctl.spec.load import Difference, differences
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import shown_memory
from clusterctl.state.inventory import Inventory, applied_if_known, distribution_ahead, inventory_if_known
from clusterctl.state.workspace import Workspace

_WORDS = {"make": "made", "change": "changed", "replace": "made anew", "remove": "removed"}
_NOT_COPIED = ("logs", "rendered", "id_ed25519", "munge.key")
END_S = 60.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Impact:
    """What a change does to jobs: those that it would end, and the nodes that keep their size.

    ``unknown`` says why that is not known, ``drained`` which nodes were drained to find it out.
    """

    keep: Mapping[str, Size] = field(default_factory=dict)
    affected: tuple[AffectedJob, ...] = ()
    unknown: str = ""
    drained: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{name} keeps {' and '.join(size.parts[:2])} while jobs run there"
            for name, size in self.keep.items()
        )


@dataclass(frozen=True, slots=True)
class AffectedJob:
    job: JobInfo
    why: str

    def __str__(self) -> str:
        where = f" on {','.join(self.job.nodes)}" if self.job.nodes else ""
        return f"job {self.job.id} ({self.job.name}) of {self.job.user}{where}: {self.why}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What `up` would do. ``notes`` change nothing; the user should know them all the same.

    ``tasks`` is what configuring would change on machines of the user's own.
    """

    hosts: HostPlan
    jobs: Impact = field(default_factory=Impact)
    settings: tuple[Difference, ...] = ()
    drift: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    tasks: tuple[TaskProgress, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether `up` would change nothing; it repairs all drift, or fails on it."""
        return not any((self.hosts.changes, self.hosts.other, self.settings, self.drift))

    @property
    def staying(self) -> set[str]:
        """The hosts that run, and stay."""
        return {host.name for host in self.hosts.hosts if host.action in {"keep", "change"} and not host.off}

    @property
    def summary(self) -> str:
        """``2 hosts made, 1 removed``."""
        actions = [host.action for host in self.hosts.hosts]
        counts = [(word, actions.count(action)) for action, word in _WORDS.items() if action in actions]
        parts = [f"{count} {word}" for word, count in counts] or [f"all {len(actions)} stay"]
        return f"hosts: {', '.join(parts)}"


def preview(session: ClusterSession) -> Plan:
    """What `up` would do with this spec, as far as a short look can tell."""
    before = inventory_if_known(session.workspace)
    with workspace_copy(session.workspace, without=_NOT_COPIED) as copy, session.connections:
        planning = replace(session, workspace=copy)  # where the provider writes
        planning.connections = session.connections
        found = plan_changes(planning)
        notes = [*planning.notes, *found.hosts.notes, *found.jobs.notes]
        if worker := session.workspace.worker():
            notes.append(f"{worker}: what it does may change this")
        notes += _refusals(session, before)
        drift = tuple(_drift(session, found, before, notes))
        found = replace(found, drift=drift, notes=tuple(notes))
        if before is None or found.is_empty or not session.spec.provider.user_owned:
            return found
        return _with_tasks(session, found, before, copy)


def plan_changes(session: ClusterSession) -> Plan:
    """Plan all that must be known before anything is changed: all but what drifted.

    Raises:
        UsageError: the cluster is up under another provider.
    """
    spec, workspace, provider = session.spec, session.workspace, session.provider
    before = inventory_if_known(workspace)
    applied = applied_if_known(workspace)  # hosts may be there, though the last `up` left no inventory
    there = before.provider if before else applied and applied.provider.type
    differs = where = ""
    if there not in (None, spec.provider.type):
        differs, where = f"under the provider {there}", "provider.type"
    elif before and before.scheduler != spec.scheduler:
        differs, where = f"with `scheduler: {before.scheduler}`", "scheduler"
    if differs:
        fix = "take it down first, or give the new cluster another name"
        raise UsageError(
            f"cluster {spec.name!r} is up already, {differs}",
            code="up-with-other-provider",
            where=where,
            fix=fix,
        )
    inputs = class_ahead(session)
    hosts = provider.plan(spec, workspace, keep={}, report=session.report, inputs=inputs)
    if before is None:
        plan = Plan(hosts)
        session.notes += (*storage_left_alone(spec), *_missing_pmix(spec, workspace))
    else:
        scheduler = scheduler_of(before, session.connections.to, patience_s=SHORT_PATIENCE_S)
        affected = impact_of(session, before, hosts, scheduler)
        if affected.keep:
            hosts = provider.plan(spec, workspace, keep=affected.keep, report=session.report, inputs=inputs)
        no_spec = (Difference("spec", "the applied spec is not known"),)
        plan = Plan(hosts, affected, differences(applied, spec) if applied else no_spec)
    session.note = plan.summary
    return plan


def _missing_pmix(spec: ClusterSpec, workspace: Workspace) -> tuple[str, ...]:
    """Return a note if the Slurm that a new cluster is made with has no plugin for PMIx."""
    distribution, release = distribution_ahead(spec, workspace), spec.slurm.version
    if distribution is None or release not in distribution.slurm_without_pmix:
        return ()
    return (
        Notice(
            "slurm-without-pmix",
            f"Slurm {release} has no plugin for PMIx here: `submit` starts ranks by mpirun instead of srun "
            "and rejects `srun --mpi=pmix`, and an MPI program that a plain srun starts fails in MPI_Init",
        ),
    )


def _drift(
    session: ClusterSession, found: Plan, before: Inventory | None, notes: list[str]
) -> Iterator[Drift]:
    """What `up` would repair; what else is seen of the hosts is added to ``notes``."""
    spec, workspace, staying = session.spec, session.workspace, found.staying
    if before is None or before.controller.name not in staying:
        if staying:
            yield Drift(spec.controller_host, converge.UNFINISHED)
        return
    session.report("probing the hosts")
    asked = {h: one for h, one in probe_requests(spec, before, workspace).items() if h in staying}
    try:
        reports = probe_hosts(asked, session.connections.to, timeout_s=SHORT_PATIENCE_S)
    except TransportError as exc:
        for failure in exc.failures:
            host = failure.host or before.controller.name
            yield Drift(host, f"it does not answer: {failure.cause}")
        return
    notes += without_cgroups(before, reports)
    yield from converge.drift_of(workspace, reports)
    for host, report in reports.items():
        for disk in report.full:
            yield Drift(host, f"{disk}; `up` will not go on before there is room")
    nodes = converge.pending_changes(session, before, reports)
    for host, what in nodes.changes.items():
        yield Drift(host, f"{what}: {nodes.waiting[host]}" if host in nodes.waiting else what)
    is_alike = not (found.hosts.changes or found.settings)
    if is_alike and (why := converge.stale(spec, before, workspace, nodes.unchanged)):
        yield Drift("all hosts", f"configured anew: {why}")
    yield from _drift_of_services(session, before, staying)


def _drift_of_services(session: ClusterSession, before: Inventory, staying: set[str]) -> Iterator[Drift]:
    """What Slurm says of its nodes, and whether the environment of the spec's requirements is there."""
    spec, controller = session.spec, before.controller.name
    try:
        nodes = scheduler_of(before, session.connections.to, patience_s=SHORT_PATIENCE_S).nodes()
        for host, what in verify.unusable(node for node in nodes if node.name in staying):
            yield Drift(host, what)
    except (SchedulerError, TransportError) as exc:
        yield Drift(controller, f"Slurm does not answer: {exc.why or exc.what}")
    if spec.software.python.requirements is None:
        return
    try:
        to = session.connections.to(controller, spec.job_user.name)
        lacks = unbuilt(spec, before.distribution, lambda: to)
    except TransportError as exc:
        lacks = f"it can't be looked at: {exc.why or exc.what}"
    if lacks:
        yield Drift(controller, f"the Python environment of the spec: {lacks}")


def _refusals(session: ClusterSession, before: Inventory | None) -> Iterator[str]:
    """Why `up` would refuse the spec, its users, or this machine, at once."""
    checks = [partial(session.provider.check, session.spec)]
    if before is not None:
        checks.append(partial(reject_changed_users, session, before))
    for check in checks:
        try:
            check()
        except (MachineError, UsageError) as exc:
            yield f"`up` refuses this: {exc.what}; {exc.why}; {exc.fix}"


def _with_tasks(session: ClusterSession, found: Plan, before: Inventory, copy: Workspace) -> Plan:
    """The plan, with what configuring would change on hosts of somebody's own that are part of it already.

    On those that are new, everything is: what is there is noted first, and given back by `down`.
    """
    spec, workspace = session.spec, session.workspace
    if away := [host.name for host in before.hosts if host.name not in found.staying]:
        return replace(found, notes=(*found.notes, f"no look ahead, task by task, without {', '.join(away)}"))
    session.report("running Ansible in check mode")
    for secret in (workspace.munge_key, workspace.key):
        (copy.root / secret.name).symlink_to(secret)
    try:
        asked = probe_requests(spec, before, workspace)
        reports = probe_hosts(asked, session.connections.to, timeout_s=SHORT_PATIENCE_S)
        nodes = converge.pending_changes(session, before, reports)
        converge.render(spec, before, copy, nodes.reports)
        tasks, failures = ansible.preview(before, copy, limit=tuple(nodes.reports))
    except (ConfigureError, TransportError) as exc:
        return replace(found, notes=(*found.notes, f"what tasks would change can't be told: {exc.what}"))
    told = (f"{f.host}: what comes after {f.phase} can't be told: {f.cause}" for f in failures)
    return replace(found, tasks=tasks, notes=(*found.notes, *told))


def review(
    session: ClusterSession,
    planned: HostPlan,
    *,
    force: bool,
    discard: bool = False,
    replaced: Collection[str] = (),
) -> Mapping[str, Size]:
    """Check what the spec changes of a cluster that is up; under ``force`` jobs in its way are cancelled.

    Nodes that leave or stop are drained first, so that no job begins there, and resumed if the change is
    refused. Under ``discard`` what exists only on them, and on ``replaced`` ones, is lost.
    Returns the nodes that keep their size, since jobs are at work there.
    """
    before = inventory_if_known(session.workspace)
    if before is None:
        return {}
    reject_changed_users(session, before)
    scheduler = scheduler_of(before, session.connections.to, patience_s=SHORT_PATIENCE_S)
    impact = impact_of(session, before, planned, scheduler, drain=True)

    def look() -> tuple[str, ...]:
        if not (planned.changes or planned.other_lost or replaced):
            return ()
        try:
            found = session.phase(
                look_at_leaving, before, planned, scheduler, replaced=replaced, discard=discard
            )
        except ClusterctlError:
            if impact.drained:
                scheduler.resume(impact.drained)
            raise
        return tuple(f"discarded: {line}" for line in found.lines)

    lost = look()
    notes = settle(impact, scheduler_of(before, session.connections.to), force=force)
    if impact.affected:  # a job may write until it has ended
        lost = look()
    session.notes += [*lost, *notes]
    return impact.keep


def impact_of(
    session: ClusterSession,
    before: Inventory,
    planned: HostPlan,
    scheduler: Scheduler,
    *,
    drain: bool = False,
) -> Impact:
    """What the change to the session's spec means for jobs.

    ``drain``: none starts on nodes that leave or stop.
    """
    spec, provider = session.spec, session.provider
    changes = _NodeChanges.of(spec, before, provider.sizes(spec), planned.changes)
    if not (changes.gone or changes.resized or changes.stopped):
        return Impact()
    try:
        found = drain_usable(scheduler, changes.gone.union(changes.stopped) if drain else (), REASON)
    except (SchedulerError, TransportError) as exc:
        # Without an answer nodes may be at work all the same; hosts that are off have no jobs to spare.
        may_work = isinstance(exc, SchedulerError) or provider.alive(before.cluster_id)
        return Impact(unknown=exc.cause if may_work else "")
    affected = tuple(changes.affected(found.jobs, found.nodes))
    ending = {one.job.id for one in affected}
    keep = changes.kept({node for job in found.jobs if job.id not in ending for node in job.nodes})
    return Impact(keep, affected, drained=found.drained)


def settle(impact: Impact, scheduler: Scheduler, *, force: bool) -> tuple[str, ...]:
    """Reject a change that would cancel jobs, or under ``force`` cancel them; what the user should know."""
    if force:
        _end(impact.affected, scheduler)
        return (*(Notice("job-ended", f"ended {job}") for job in impact.affected), *impact.notes)
    if impact.affected and impact.drained:
        scheduler.resume(impact.drained)
    reject(impact)
    return impact.notes


def reject(impact: Impact) -> None:
    """Raise UsageError at a change that would end jobs, or of which nobody can tell."""
    if impact.unknown:
        raise UsageError(
            "the jobs that this change would end are not known",
            code="jobs-unknown",
            why=impact.unknown,
            fix="run `clusterctl up` with the spec as it was, which repairs the cluster; or go ahead: "
            "--force",
        )
    if impact.affected:
        count = len(impact.affected)
        raise UsageError(
            f"this change would end {count} job{'s' if count > 1 else ''}",
            code="jobs-would-end",
            why="; ".join(map(str, impact.affected)),
            fix="wait until they have ended, or end them: `clusterctl cancel`, or say it again with "
            "`--force`, which ends them for you",
        )


@dataclass(frozen=True, slots=True)
class _NodeChanges:
    """The nodes that go, and those whose size changes: as they are, and as they would be.

    ``stopped``: hosts that the provider makes anew or restarts, and why.
    """

    partitions: Mapping[str, Partition]  # by node
    gone: frozenset[str]
    resized: Mapping[str, tuple[Size, Size]]
    stopped: Mapping[str, str]
    controller: str

    @classmethod
    def of(
        cls, spec: ClusterSpec, before: Inventory, sizes: Mapping[str, Size], hosts: Sequence[HostChange]
    ) -> _NodeChanges:
        partitions = {node: partition for partition in spec.partitions for node in spec.node_names(partition)}
        resized = {
            host.name: (size, sizes[host.name])
            for host in before.compute
            if host.name in sizes and (size := Size.of(host)) and size != sizes[host.name]
        }
        gone = frozenset(host.name for host in before.compute if host.name not in partitions)
        gone |= {host.name for host in hosts if host.released and host.action == "replace"}
        controller = before.controller.name
        stopped = {}
        for host in hosts:
            anew = host.action == "replace" and not host.released
            if anew or (host.restarts and host.name != controller):
                why = f": {host.why}" if host.why else ""
                stopped[host.name] = f"{host.name} is {'made anew' if anew else 'restarted'}{why}"
        return cls(partitions, gone, resized, stopped, controller)

    def affected(self, active: Iterable[JobInfo], nodes: Mapping[str, NodeInfo]) -> Iterator[AffectedJob]:
        reasons = {**self.stopped, **{node: f"{node} leaves the cluster" for node in self.gone}}
        for name, (now, then) in self.resized.items():
            partition = self.partitions[name]
            allocated = nodes[name].allocated_mib if name in nodes else 0
            if now.disk_mib != then.disk_mib:
                reasons[name] = f"{name} is made anew, with another disk"
            elif partition.cpus is not None and now.cpus != then.cpus:
                reasons[name] = f"{name} gets {then.cpus} CPUs instead of {now.cpus}"
            elif partition.memory is not None and allocated > then.memory_mib:
                reasons[name] = f"{name} gets {shown_memory(then.memory_mib)} of memory, less than jobs have"
        stay = {partition.name for partition in self.partitions.values()}
        for job in active:
            where = (self.controller, *job.nodes)  # who loses the controller forgets all jobs
            if hit := [reasons[node] for node in where if node in reasons]:
                yield AffectedJob(job, hit[0])
            elif not job.nodes and not stay & set(job.partition.split(",")):
                yield AffectedJob(job, f"partition {job.partition} is removed")

    def kept(self, at_work: Collection[str]) -> dict[str, Size]:
        """The nodes at work that would change without the spec saying so, with the size that they keep."""
        keep = {}
        for name, (now, then) in self.resized.items():
            partition = self.partitions[name]
            size = replace(
                then,
                cpus=then.cpus if partition.cpus else now.cpus,
                memory_mib=then.memory_mib if partition.memory else now.memory_mib,
            )
            if name in at_work and size != then:
                keep[name] = size
        return keep


def reject_changed_users(session: ClusterSession, before: Inventory) -> None:
    """``reject_taken_uids``, of changed users and where the controller answers; else their role says it."""
    applied = applied_if_known(session.workspace)
    if applied is None or session.spec.users != applied.users:
        with suppress(TransportError):
            accounts = session.connections.to(before.controller.name).run(["cat", "/etc/passwd"])
            reject_taken_uids(session.spec, accounts.stdout)


def reject_taken_uids(spec: ClusterSpec, accounts: str) -> None:
    """Raise UsageError at a uid that is another's in ``accounts``, the controller's table of accounts.

    An account's number belongs to its files: it can't pass to another name while the hosts live.
    """
    rows = (line.split(":") for line in accounts.splitlines())
    holders = {int(row[2]): row[0] for row in rows if len(row) > 2 and row[2].isdigit()}  # noqa: PLR2004
    taken = [user for user in spec.users if holders.get(user.uid, user.name) != user.name]
    if taken:
        raise UsageError(
            f"a uid can't pass to another user: {', '.join(f'{u.name} ({u.uid})' for u in taken)}",
            code="uid-taken",
            where="users",
            why="; ".join(
                f"uid {u.uid} is that of {holders[u.uid]} on the hosts, with their files" for u in taken
            ),
            fix="give each new name a uid that nobody had, or take the cluster down first",
        )


def _end(affected: Sequence[AffectedJob], scheduler: Scheduler) -> None:
    """End these jobs, with the reason in their accounting, and wait until they have ended."""
    if not affected:
        return
    for job in affected:
        scheduler.annotate(job.job.id, f"clusterctl up --force: {job.why}")
    ids = [job.job.id for job in affected]
    scheduler.cancel(ids)
    for _ in scheduler.clock.polls(END_S, longest_s=_PAUSE_S):
        left = [job.id for job in active_jobs(scheduler) if job.id in ids]
        if not left:
            return
    raise SchedulerError(
        f"jobs do not end: {', '.join(left)}",
        code="jobs-do-not-end",
        fix="look at them with `clusterctl jobs`",
    )
