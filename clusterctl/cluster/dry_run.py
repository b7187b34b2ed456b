"""What would stop `up`, asked without changing anything."""

from __future__ import annotations

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.impact import reject_changed_users, reject_jobs
from clusterctl.cluster.losses import LeavingHosts, check_leaving_hosts
from clusterctl.cluster.plan import Plan
from clusterctl.cluster.up import UpOptions
from clusterctl.scheduler.session import SHORT_PATIENCE_S


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
