"""What a change of the cluster does to jobs, and how the hosts that leave are cleared of them.

Slurm ends the jobs of a node whose number of CPUs changes. So a node at work keeps its size if the spec sets
none; if the spec itself changes the size, the change is rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.look import LeavingHosts, look_at_leaving
from clusterctl.cluster.nodes import REASON, drain_usable, resume_drained
from clusterctl.errors import ClusterctlError, Notice, SchedulerError, TransportError, UsageError
from clusterctl.providers.base import HostPlan, Size
from clusterctl.runs.only_copies import NOTHING, OnlyCopies
from clusterctl.scheduler.base import JobInfo, Jobs, Nodes, active_jobs
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.spec.common import Partition
from clusterctl.spec.models import ClusterSpec
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

    def look() -> OnlyCopies:
        if not (planned.changes or planned.other_lost or replaced):
            return NOTHING
        leaving = LeavingHosts(before, planned, replaced)
        return cluster.run("look_at_leaving", look_at_leaving, leaving, scheduler, discard=discard)

    try:
        if not force:
            reject(impact)
        lost = look()
        if impact.affected:
            end_jobs(impact.affected, cluster.scheduler(before))
            lost = look()  # a job may write until it has ended
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
    partitions = {node: partition for partition in spec.partitions for node in spec.node_names(partition)}
    sizes, now = provider.sizes(spec), {one.name: size for one in before.compute if (size := Size.of(one))}
    resized = [name for name, size in now.items() if sizes.get(name, size) != size]
    reasons = _why_stopped(before, planned, partitions)
    if not (reasons or resized):
        return Impact()
    try:
        found = drain_usable(scheduler, reasons if drain else (), REASON)
    except (SchedulerError, TransportError) as exc:
        # Without an answer nodes may be at work all the same; hosts that are off have no jobs to spare.
        may_work = isinstance(exc, SchedulerError) or provider.alive(before.cluster_id)
        return Impact(unknown=exc.cause if may_work else "")
    keep = {}
    for name in resized:
        partition, old, new = partitions[name], now[name], sizes[name]
        allocated = found.nodes[name].allocated_mib if name in found.nodes else 0
        too_small = partition.memory is not None and allocated > new.memory_mib
        if old.disk_mib != new.disk_mib or (partition.cpus and old.cpus != new.cpus) or too_small:
            reasons[name] = f"{name} gets {new} instead of {old}"
        else:
            cpus = new.cpus if partition.cpus else old.cpus
            memory_mib = new.memory_mib if partition.memory else old.memory_mib
            keep[name] = replace(new, cpus=cpus, memory_mib=memory_mib)
    affected = tuple(_affected(found.jobs, reasons, before, partitions))
    ending = {one.job.id for one in affected}
    at_work = {node for job in found.jobs if job.id not in ending for node in job.nodes}
    keep = {name: size for name, size in keep.items() if name in at_work and size != sizes[name]}
    return Impact(keep, affected, drained=found.drained)


def _why_stopped(before: Inventory, planned: HostPlan, partitions: Mapping[str, Partition]) -> dict[str, str]:
    """Host -> why its jobs end, for hosts that leave, are made anew or restarted. Nodes outlive a restart of
    the controller.

    partitions: the partition of each node that the spec names.
    """
    reasons = {}
    for host in planned.changes:
        why = f": {host.why}" if host.why else ""
        if host.action == "replace":
            reasons[host.name] = (
                f"{host.name} {'leaves the cluster' if host.released else f'is made anew{why}'}"
            )
        elif host.restarts and host.name != before.controller.name:
            reasons[host.name] = f"{host.name} is restarted{why}"
    gone = [host.name for host in before.compute if host.name not in partitions]
    return {**reasons, **{name: f"{name} leaves the cluster" for name in gone}}


def _affected(
    active: Iterable[JobInfo],
    reasons: Mapping[str, str],
    before: Inventory,
    partitions: Mapping[str, Partition],
) -> Iterator[AffectedJob]:
    stay = {partition.name for partition in partitions.values()}
    for job in active:
        hosts = (before.controller.name, *job.nodes)  # a controller that goes forgets all jobs
        why = next((reasons[host] for host in hosts if host in reasons), "")
        if not (why or job.nodes or stay & set(job.partition.split(","))):
            why = f"partition {job.partition} is removed"
        if why:
            yield AffectedJob(job, why)


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
