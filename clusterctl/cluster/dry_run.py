"""The effect of `up` on a cluster: its digest, the error that would stop it, and its highest cost."""

from __future__ import annotations

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.impact import reject_changed_users, reject_jobs
from clusterctl.cluster.losses import LeavingHosts, check_leaving_hosts
from clusterctl.cluster.plan import Plan
from clusterctl.cluster.up import UpOptions
from clusterctl.jobs.plan import AtMost
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import (
    identity_of,
)
from clusterctl.state.workspace import Workspace
from clusterctl.util.digest import digest_of


def reject_up(cluster: ClusterContext, plan: Plan, options: UpOptions) -> None:
    """Raise the error with which `up` would stop before it carries out a plan. Change nothing.

    Raises:
        MachineError, UsageError: the spec, its users or this machine would be rejected, or jobs
            would be cancelled.
        OnlyCopyError: data exists only on hosts that leave.
    """
    cluster.provider.check(cluster.spec)
    before = cluster.inventory
    if before is None:
        return
    with cluster.connections:
        reject_jobs(cluster, plan.hosts)
        reject_changed_users(cluster)
        scheduler = cluster.scheduler(before, patience_s=SHORT_PATIENCE_S)
        leaving = LeavingHosts(before, plan.hosts, options.replaced)
        check_leaving_hosts(cluster, leaving, scheduler, discard=options.discard)


def digest_of_plan(spec: ClusterSpec, plan: Plan, options: UpOptions) -> str:
    """Return a digest of the effect of `up` with a spec and options. Repairs of drift don't count."""
    hosts = plan.hosts
    return digest_of(
        [
            "up",
            *identity_of(Workspace.of(spec.name)),
            dump_spec(spec),
            [
                [host.name, host.action, host.what, host.why, host.usd_per_hour]
                for host in hosts.changes
            ],
            [hosts.other],
            [[setting.key, setting.what] for setting in plan.settings],
            [options.reconfigure, options.discard],
            [sorted(options.limit or ()), sorted(options.replaced)],
        ]
    )


def most_of_up(plan: Plan, spec: ClusterSpec) -> AtMost:
    """Return the most that a cluster can use. A cluster runs until `down`, so only the cost of a
    free cluster is bounded.
    """
    usd = None if spec.provider.is_cloud or plan.hosts.usd_per_hour else 0.0
    nodes = sum(partition.nodes for partition in spec.partitions)
    return AtMost(jobs=0, tasks=0, node_hours=None, usd=usd, nodes=nodes)
