"""The effect of a changed spec on jobs, and the draining of hosts that leave the cluster.

Slurm cancels the jobs of a node if its number of CPUs changes. So a node with jobs keeps its size,
unless the spec demands another size; then the change is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.losses import LeavingHosts, check_leaving_hosts
from clusterctl.cluster.nodes import REASON, drain_usable, resume_drained
from clusterctl.errors import ClusterctlError, Notice, SchedulerError, TransportError, UsageError
from clusterctl.providers.base import HostPlan, Size
from clusterctl.runs.only_copies import NOTHING, OnlyCopies
from clusterctl.scheduler.admin import active_jobs
from clusterctl.scheduler.base import JobInfo, JobState, Nodes
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.spec.common import Partition
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory

END_S = 60.0
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Impact:
    """The effect of a changed spec on jobs.

    keep: node -> the size that the node keeps, because it runs jobs.
    affected: the jobs that the change would cancel. unknown: why these jobs are unknown, else "".
    drained: the nodes that were drained to find the affected jobs.
    """

    keep: Mapping[str, Size] = field(default_factory=dict)
    affected: tuple[AffectedJob, ...] = ()
    unknown: str = ""
    drained: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            (
                f"{name} keeps {' and '.join(size.parts[:2])} while jobs run there; the next "
                "`up` changes it"
            )
            for name, size in self.keep.items()
        )


@dataclass(frozen=True, slots=True)
class AffectedJob:
    """A job that a changed spec would cancel, and why."""

    job: JobInfo
    why: str

    def __str__(self) -> str:
        nodes = f" on {','.join(self.job.nodes)}" if self.job.nodes else ""
        return f"job {self.job.id} ({self.job.name}) of {self.job.user}{nodes}: {self.why}"


def free_leaving_hosts(
    cluster: ClusterContext,
    planned: HostPlan,
    *,
    force: bool,
    discard: bool = False,
    replaced: Collection[str] = (),
) -> Mapping[str, Size]:
    """Drain nodes that a plan removes or restarts, check for lost data, cancel affected jobs.

    After an error, resume the nodes. Return node -> its size, for nodes that keep their size
    because they run jobs.

    force: cancel the affected jobs.
    discard: delete data that exists only on hosts that leave.
    replaced: names of hosts that leave because different machines get these names.

    Raises:
        OnlyCopyError: data exists only on these hosts, and ``discard`` is false.
        UsageError: the change would cancel jobs, and ``force`` is false.
    """
    before = cluster.inventory
    if before is None:
        return {}
    reject_changed_users(cluster)
    scheduler = cluster.scheduler(before, patience_s=SHORT_PATIENCE_S)
    impact = impact_of(cluster, before, planned, scheduler, drain=True)

    def look() -> OnlyCopies:
        if not (planned.changes or replaced):
            return NOTHING
        leaving = LeavingHosts(before, planned, replaced)
        return cluster.run(
            "check_leaving_nodes", check_leaving_hosts, leaving, scheduler, discard=discard
        )

    try:
        if not force:
            reject(impact)
        lost = look()
        if impact.affected:
            cancel_jobs(impact.affected, cluster.scheduler(before))
            # Jobs may have written files until they were cancelled.
            lost = look()
    except ClusterctlError:
        resume_drained(scheduler, impact.drained)
        raise
    ended = (Notice("job-ended", f"cancelled {job}") for job in impact.affected)
    cluster.notes += [*(f"discarded: {line}" for line in lost.lines), *ended, *impact.notes]
    return impact.keep


def impact_of(
    cluster: ClusterContext,
    before: Inventory,
    planned: HostPlan,
    scheduler: Nodes,
    *,
    drain: bool = False,
) -> Impact:
    """Return the effect of the changed spec on jobs.

    before: the inventory of the last `up`.
    drain: drain the nodes that leave or restart, so that they start no new job.
    """
    spec = cluster.spec
    provider = cluster.provider
    partitions = {
        node: partition for partition in spec.partitions for node in spec.node_names(partition)
    }
    new_sizes = provider.sizes(spec)
    old_sizes = {host.name: size for host in before.compute if (size := Size.of(host))}
    resized = [name for name, size in old_sizes.items() if new_sizes.get(name, size) != size]
    reasons = _why_stopped(before, planned, partitions)
    if not (reasons or resized):
        return Impact()
    leaving = {host.name for host in before.compute} - partitions.keys()
    try:
        snapshot = drain_usable(scheduler, reasons if drain else (), REASON)
        waits = leaving and any(job.state is JobState.PENDING for job in snapshot.jobs)
        required = scheduler.required_nodes() if waits else {}
    except (SchedulerError, TransportError) as exc:
        # Nodes may run jobs even if the scheduler does not answer, unless the hosts are powered
        # off.
        may_work = isinstance(exc, SchedulerError) or provider.alive(before.cluster_id)
        return Impact(unknown=exc.cause if may_work else "")
    keep = {}
    for name in resized:
        partition = partitions[name]
        old = old_sizes[name]
        new = new_sizes[name]
        allocated = (snapshot.nodes[name].allocated_mib if name in snapshot.nodes else 0) or 0
        too_small = partition.memory is not None and allocated > new.memory_mib
        if old.disk_mib != new.disk_mib or (partition.cpus and old.cpus != new.cpus) or too_small:
            reasons[name] = f"{name} gets {new} instead of {old}"
        else:
            cpus = new.cpus if partition.cpus else old.cpus
            memory_mib = new.memory_mib if partition.memory else old.memory_mib
            keep[name] = replace(new, cpus=cpus, memory_mib=memory_mib)
    sizes = {name: len(nodes) for name, nodes in spec.nodes_by_partition.items()}
    sizes |= {line.value: len(nodes) for line, nodes in spec.more_partitions.items()}
    ended = tuple(_ended(snapshot.jobs, reasons, before))
    ending = {job.job.id for job in ended}
    rest = [job for job in snapshot.jobs if job.id not in ending]
    affected = (*ended, *_stranded(rest, sizes, leaving, required))
    at_work = {node for job in snapshot.jobs if job.id not in ending for node in job.nodes}
    keep = {
        name: size for name, size in keep.items() if name in at_work and size != new_sizes[name]
    }
    return Impact(keep, affected, drained=snapshot.drained)


def _why_stopped(
    before: Inventory, planned: HostPlan, partitions: Mapping[str, Partition]
) -> dict[str, str]:
    """Return host -> why the plan would cancel its jobs. A restarted controller cancels no job."""
    reasons = {}
    for host in planned.changes:
        cause = f": {host.why}" if host.why else ""
        if host.action == "replace":
            reasons[host.name] = (
                f"{host.name} {'leaves the cluster' if host.released else f'is recreated{cause}'}"
            )
        elif host.name == before.controller.name:
            continue
        elif host.restarts:
            reasons[host.name] = f"{host.name} is restarted{cause}"
        elif disks := (*host.deleted_disks, *host.detached_disks):
            reasons[host.name] = f"{host.name} loses {', '.join(disks)}"
    removed = [host.name for host in before.compute if host.name not in partitions]
    return {**reasons, **{name: f"{name} leaves the cluster" for name in removed}}


def _ended(
    active: Iterable[JobInfo], reasons: Mapping[str, str], before: Inventory
) -> Iterator[AffectedJob]:
    """Yield the jobs that end with a host."""
    for job in active:
        # All jobs are lost with the controller.
        hosts = (before.controller.name, *job.nodes)
        reason = next((reasons[host] for host in hosts if host in reasons), "")
        if reason:
            yield AffectedJob(job, reason)


def _stranded(
    active: Iterable[JobInfo],
    sizes: Mapping[str, int],
    leaving: Set[str],
    required: Mapping[int, Collection[str]],
) -> Iterator[AffectedJob]:
    """Yield the waiting jobs that could never start after the change.

    sizes: partition -> number of its nodes after the change. leaving: nodes that leave the cluster.
    required: number of a waiting job -> the nodes that it asks for by name.
    """
    for job in active:
        if job.nodes or job.state is not JobState.PENDING:
            continue
        partitions = [name for name in job.partition.split(",") if name in sizes]
        largest = max((sizes[name] for name in partitions), default=0)
        asks_for = re.search(r"\bnode=(\d+)", job.tres)
        gone = sorted(leaving & {*required.get(job.number, ())})
        if not partitions:
            yield AffectedJob(job, f"partition {job.partition} is removed")
        elif gone:
            yield AffectedJob(job, f"it asks for {', '.join(gone)}, which leaves the cluster")
        elif leaving and asks_for and int(asks_for[1]) > largest:
            why = f"it asks for {asks_for[1]} nodes, and partition {job.partition} keeps {largest}"
            yield AffectedJob(job, why)


def reject(impact: Impact) -> None:
    """Raise UsageError if the change would cancel jobs, or if the affected jobs are unknown."""
    if impact.unknown:
        raise UsageError(
            "can't determine which jobs this change would cancel",
            code="jobs-unknown",
            why=impact.unknown,
            fix="run `clusterctl up` with the previous spec, which repairs the cluster; or pass "
            "--force to apply the change anyway",
        )
    if impact.affected:
        raise UsageError(
            f"this change would cancel jobs: {len(impact.affected)}",
            code="jobs-would-end",
            why="; ".join(map(str, impact.affected)),
            fix="wait until the jobs have ended (`clusterctl node drain NODE` starts no new ones "
            "there), or cancel them: `clusterctl cancel`; or run the command again with --force, "
            "which cancels them",
        )


def reject_changed_users(cluster: ClusterContext) -> None:
    """Raise UsageError if `users` changed, and a user has another controller account's uid.

    If the controller is unreachable, nothing is checked, and the Ansible role `users` fails later.
    """
    before = cluster.inventory
    applied = cluster.applied
    if before is not None and (applied is None or cluster.spec.users != applied.users):
        with suppress(TransportError):
            accounts = cluster.connections.to(before.controller.name).run(["cat", "/etc/passwd"])
            reject_taken_uids(cluster.spec, accounts.stdout)


def reject_taken_uids(spec: ClusterSpec, accounts: str) -> None:
    """Raise UsageError if a user of the spec has the uid of another account on the controller.

    The new user would own the files of that account. ``accounts``: the controller's /etc/passwd.
    """
    rows = (line.split(":") for line in accounts.splitlines())
    holders = {int(row[2]): row[0] for row in rows if len(row) > 2 and row[2].isdigit()}  # noqa: PLR2004
    taken = [user for user in spec.users if holders.get(user.uid, user.name) != user.name]
    if taken:
        raise UsageError(
            "these users have uids of other accounts: "
            f"{', '.join(f'{u.name} ({u.uid})' for u in taken)}",
            code="uid-taken",
            where="users",
            why="; ".join(
                f"on the hosts, uid {u.uid} belongs to user {holders[u.uid]}" for u in taken
            ),
            fix="give each new user an unused uid, or take the cluster down first",
        )


def cancel_jobs(affected: Sequence[AffectedJob], scheduler: Nodes) -> None:
    """Cancel jobs, with the reason in Slurm's accounting, and wait at most 60 s for their end.

    Raise SchedulerError if a job can't be cancelled, or is still active after that time.
    """
    for job in affected:
        scheduler.annotate(job.job.id, f"clusterctl up --force: {job.why}")
    ids = [job.job.id for job in affected]
    for error in scheduler.cancel(ids).values():
        raise error
    for _ in scheduler.clock.polls(END_S, longest_s=_PAUSE_S):
        remaining = [job.id for job in active_jobs(scheduler) if job.id in ids]
        if not remaining:
            return
    raise SchedulerError(
        f"cancelled jobs are still active: {', '.join(remaining)}",
        code="jobs-do-not-end",
        fix="check with `clusterctl jobs` that the jobs have ended, then run the command again",
    )
