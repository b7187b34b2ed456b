"""The jobs that a changed spec would cancel.

Slurm cancels the jobs of a node that leaves, restarts or gets another number of CPUs. So `up`
refuses to change a node with jobs, and drains the nodes that it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from contextlib import suppress

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.losses import LeavingHosts, check_leaving_hosts
from clusterctl.cluster.nodes import REASON, drain_usable, resuming
from clusterctl.errors import SchedulerError, TransportError, UsageError
from clusterctl.providers.base import HostPlan
from clusterctl.scheduler.base import BEFORE_START, JobInfo
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.scheduler.slurm.values import amounts_of, fold_nodes
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import PROOF_PARTITION
from clusterctl.state.inventory import Inventory


def free_changed_hosts(
    cluster: ClusterContext,
    planned: HostPlan,
    *,
    discard: bool = False,
    replaced: Collection[str] = (),
) -> None:
    """Drain the nodes that a plan changes, and check that no job and no only copy is lost.

    After an error or an interruption, resume the nodes.

    discard: delete data that exists only on hosts that leave.
    replaced: names of hosts that leave because different machines get these names.

    Raises:
        OnlyCopyError: data exists only on these hosts, and ``discard`` is false.
        UsageError: the change would cancel jobs.
    """
    before = cluster.inventory
    if before is None:
        return
    reject_changed_users(cluster)
    drained = reject_jobs(cluster, planned, drain=True)
    if not (planned.changes or replaced):
        return
    scheduler = cluster.scheduler(before, patience_s=SHORT_PATIENCE_S)
    leaving = LeavingHosts(before, planned, replaced)
    with resuming(scheduler, drained):
        lost = cluster.run(
            "check_leaving_nodes", check_leaving_hosts, leaving, scheduler, discard=discard
        )
    cluster.notes += [f"discarded: {line}" for line in lost.lines]


def reject_jobs(
    cluster: ClusterContext, planned: HostPlan, *, drain: bool = False
) -> tuple[str, ...]:
    """Raise UsageError if a plan would cancel jobs, or if that is unknown.

    drain: first drain the nodes that the plan changes, so that they start no new job. Return the
        drained nodes. After an error or an interruption, resume them.
    """
    spec = cluster.spec
    before = cluster.inventory
    if before is None:
        return ()
    had = Counter(host.partition for host in before.compute)
    kept = {name: len(nodes) for name, nodes in spec.nodes_by_partition.items()}
    kept |= {line.value: len(nodes) for line, nodes in spec.more_partitions.items()}
    sizes = {name: (had.get(name, len(before.compute)), size) for name, size in kept.items()}
    leaving = {host.name for host in before.compute} - {
        node for partition in spec.partitions for node in spec.node_names(partition)
    }
    reasons = _why_stopped(before, planned, leaving)
    if not reasons:
        return ()
    scheduler = cluster.scheduler(before, patience_s=SHORT_PATIENCE_S)
    # All jobs are lost with the controller.
    lost = reasons.get(before.controller.name)
    try:
        snapshot = drain_usable(scheduler, reasons if drain else (), REASON)
        with resuming(scheduler, snapshot.drained):
            waits = leaving and any(job.state in BEFORE_START for job in snapshot.jobs)
            required = scheduler.required_nodes() if waits else {}
            affected = {
                job.id: (job, cause)
                for job in snapshot.jobs
                # The verification job of an `up` that was killed.
                if job.partition != PROOF_PARTITION
                and (cause := lost or _affected(job, reasons, leaving, sizes, required))
            }
            if affected:
                keep = _keep_sizes(spec, planned)
                raise _cancelled_jobs(affected, keep, drains=scheduler.drains_nodes)
    except (SchedulerError, TransportError) as exc:
        # Nodes may run jobs even if the scheduler does not answer, unless the hosts are powered
        # off.
        if isinstance(exc, SchedulerError) or cluster.provider.alive(before.cluster_id):
            raise _unknown_jobs(exc.cause) from exc
        return ()
    return snapshot.drained


def _why_stopped(before: Inventory, planned: HostPlan, leaving: Set[str]) -> dict[str, str]:
    """Return host -> why the plan would cancel its jobs. A changed controller cancels no job."""
    reasons = {}
    for host in planned.changes:
        cause = f": {host.why}" if host.why else ""
        if host.action == "replace":
            reasons[host.name] = (
                f"{host.name} {'leaves the cluster' if host.released else f'is recreated{cause}'}"
            )
        elif host.ends_jobs and host.name != before.controller.name:
            reasons[host.name] = f"{host.name} is changed{cause}"
    return {**reasons, **{name: f"{name} leaves the cluster" for name in leaving}}


def _affected(
    job: JobInfo,
    reasons: Mapping[str, str],
    leaving: Set[str],
    sizes: Mapping[str, tuple[int, int]],
    required: Mapping[int, Collection[str]],
) -> str:
    """Return why Slurm would end a job, or never start it. Empty: it would do neither.

    reasons: host -> why its jobs end. leaving: nodes that leave the cluster. sizes: partition -> the
        numbers of its nodes before and after the change. required: number of a waiting job -> the
        nodes that it asks for by name.
    """
    if reason := next((reasons[host] for host in job.nodes if host in reasons), ""):
        return reason
    if job.nodes:
        return ""
    if job.state not in BEFORE_START:
        return "its nodes are unknown"
    its_sizes = [sizes[name] for name in job.partition.split(",") if name in sizes]
    if not its_sizes:
        return f"partition {job.partition} is removed"
    before = max(size for size, _ in its_sizes)
    after = max(size for _, size in its_sizes)
    asked = int(amounts_of(job.tres).get("node", 0))
    if leaving and after < asked <= before:
        return f"it asks for {asked} nodes, and {job.partition} keeps {after}"
    gone = ", ".join(sorted(leaving & {*required.get(job.number, ())}))
    return gone and f"it asks for {gone}, which leaves the cluster"


def _unknown_jobs(why: str) -> UsageError:
    return UsageError(
        "can't determine which jobs this change would cancel",
        code="would-lose",
        about="jobs-unknown",
        why=why,
        fix="leave the nodes as they were in the spec, and run `clusterctl up`, which repairs the "
        "controller, with its other settings of the spec; then change the nodes. A controller's "
        "machine that is lost must first be installed again, under its old address; or take the "
        "cluster down: `clusterctl down`",
    )


def _keep_sizes(spec: ClusterSpec, planned: HostPlan) -> str:
    """Return how nodes keep their sizes if the plan divides this machine anew. "": it does not."""
    resized = {host.name for host in planned.changes if host.ends_jobs}
    divided = [
        partition.name
        for partition in spec.partitions
        if None in (partition.cpus, partition.memory)
        and not resized.isdisjoint(spec.node_names(partition))
    ]
    if not (spec.provider.shares_kernel and divided):
        return ""
    return (
        f"write the present `cpus` and `memory` of {', '.join(divided)} into the spec, so that "
        "this machine is not divided anew; or "
    )


def _cancelled_jobs(
    affected: Mapping[str, tuple[JobInfo, str]], sizes: str, *, drains: bool
) -> UsageError:
    """Return the error about jobs.

    affected: id -> a job, and why it would end. sizes: how nodes keep their sizes. drains: whether
        nodes can be drained.
    """
    reasons = []
    for job, why in affected.values():
        place = f" on {','.join(job.nodes)}" if job.nodes else ""
        reasons.append(f"job {job.id} ({job.name}) of {job.user}{place}: {why}")
    nodes = fold_nodes(sorted({node for job, _ in affected.values() for node in job.nodes}))
    ids = " ".join(affected)
    wait = f"wait until the jobs have ended: `clusterctl wait {ids}`; or "
    if drains and nodes:
        wait = (
            f"let the jobs end, and start no new ones: `clusterctl node drain {nodes} --reason "
            f"TEXT --wait`, then run the command again, and `clusterctl node resume {nodes}` for the "
            "nodes that stay; or "
        )
    return UsageError(
        f"this change would cancel jobs: {len(affected)}",
        code="would-lose",
        about="jobs",
        why="; ".join(reasons),
        fix=f"{sizes}{wait}cancel the jobs: `clusterctl cancel {ids}`",
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
            code="host-unfit",
            about="uid-taken",
            where="users",
            why="; ".join(
                f"on the hosts, uid {u.uid} belongs to user {holders[u.uid]}" for u in taken
            ),
            fix="give each new user an unused uid, or take the cluster down first",
        )
