"""What a change of the cluster does to jobs, and how the hosts that leave are cleared of them.

Slurm ends the jobs of a node whose number of CPUs changes, in either direction. So a node at work keeps the
size that it has where the spec leaves that to us; where the spec itself says another, the change is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.look import look_at_leaving
from clusterctl.cluster.nodes import REASON, drain_usable, resume_drained
from clusterctl.errors import ClusterctlError, Notice, SchedulerError, TransportError, UsageError
from clusterctl.providers.base import HostChange, HostPlan, Size
from clusterctl.runs.only_copies import NOTHING
from clusterctl.scheduler.base import JobInfo, Jobs, NodeInfo, Nodes, active_jobs
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.spec.common import Partition
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import shown_memory
from clusterctl.state.inventory import Inventory

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


def make_way(
    cluster: ClusterContext,
    planned: HostPlan,
    *,
    force: bool,
    discard: bool = False,
    replaced: Collection[str] = (),
) -> Mapping[str, Size]:
    """Drain the nodes that leave or stop; if they hold nothing that would be lost, end the jobs in the way.

    If the change is rejected, the nodes are resumed. Returns the nodes that keep their size, because jobs
    are at work there.

    force: end the jobs. discard: lose what exists only on hosts that leave, or on ``replaced`` hosts.

    Raises:
        OnlyCopyError: something exists only on these hosts, and ``discard`` is not set.
        UsageError: the change would end jobs, and ``force`` is not set.
    """
    before = cluster.inventory
    if before is None:
        return {}
    reject_changed_users(cluster)
    scheduler = cluster.scheduler(before, patience_s=SHORT_PATIENCE_S)
    impact = impact_of(cluster, before, planned, scheduler, drain=True)
    look = partial(
        look_at_leaving,
        before=before,
        planned=planned,
        scheduler=scheduler,
        replaced=replaced,
        discard=discard,
    )
    has_look = planned.changes or planned.other_lost or replaced
    lost = NOTHING
    try:
        if has_look:
            lost = cluster.run("look_at_leaving", look)
        if not force:
            reject(impact)
        elif impact.affected:
            end_jobs(impact.affected, cluster.scheduler(before))
            # A job may write until it has ended.
            lost = cluster.run("look_at_leaving", look) if has_look else lost
    except ClusterctlError:
        resume_drained(scheduler, impact.drained)
        raise
    ended = (Notice("job-ended", f"ended {job}") for job in impact.affected)
    cluster.notes += [*(f"discarded: {line}" for line in lost.lines), *ended, *impact.notes]
    return impact.keep


def impact_of(
    cluster: ClusterContext,
    before: Inventory,
    planned: HostPlan,
    scheduler: Jobs,
    *,
    drain: bool = False,
) -> Impact:
    """Return what the change to the spec means for jobs.

    ``drain``: none starts on nodes that leave or stop.
    """
    spec, provider = cluster.spec, cluster.provider
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


def reject_changed_users(cluster: ClusterContext) -> None:
    """Reject uids that belong to other users on the controller.

    Skipped if `users` is unchanged or the controller is unreachable; the role `users` then fails.
    """
    before, applied = cluster.inventory, cluster.applied
    if before is not None and (applied is None or cluster.spec.users != applied.users):
        with suppress(TransportError):
            accounts = cluster.connections.to(before.controller.name).run(["cat", "/etc/passwd"])
            reject_taken_uids(cluster.spec, accounts.stdout)


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


def end_jobs(affected: Sequence[AffectedJob], scheduler: Jobs) -> None:
    """End these jobs, with the reason in their accounting, and wait until they have ended.

    Raises:
        SchedulerError: some jobs do not end.
    """
    if isinstance(scheduler, Nodes):
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
