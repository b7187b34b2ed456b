"""What jobs used of clusters: from Slurm's accounting, without accounting from the runs that were
collected and, of clusters that were removed, from what `down` has written.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from clusterctl.providers.registry import provider_of
from clusterctl.runs.query import RunQuery, parse_since, select_runs
from clusterctl.runs.saved_usage import ClusterUsage, saved_usages
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.usage import (
    AllocatedTime,
    UsageGrouping,
    UsageReport,
    held_by_jobs,
    summarize_usage,
)
from clusterctl.scheduler.slurm.values import GPU, amounts_of
from clusterctl.state.inventory import inventory_if_known
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import Workspace, clusters_up


def usage_of_cluster(session: Session, by: Sequence[UsageGrouping], since: str) -> UsageReport:
    """Return the usage of a cluster by its accounting or, without accounting, by collected runs, and
    that of earlier clusters of its name.

    Raises AccountingAwayError if the accounting does not answer.
    """
    usage = usage_since(session, parse_since(since))
    return report_usage([usage, *removed_usages(usage.cluster)], by, since)


def usage_since(
    session: Session, since: float, tokens: Collection[str] | None = None
) -> ClusterUsage:
    """Return the usage of a cluster that is up, since a time in Unix seconds.

    tokens: of the submissions whose runs are counted, without accounting. None: all runs.
    Raises AccountingAwayError if the accounting does not answer.
    """
    inventory = session.inventory
    jobs = session.scheduler.history(int(since))
    if jobs is None:
        return _usage_of_collected(inventory.cluster, tokens)
    spec = session.spec
    provider = provider_of(spec.provider)
    held = held_by_jobs(
        jobs,
        inventory.cluster,
        inventory.cluster_id,
        lambda name: provider.node_price(spec, name),
    )
    unread = sum(job.state is JobState.UNKNOWN for job in jobs)
    return ClusterUsage(
        cluster=inventory.cluster, source="accounting", held=tuple(held), unread=unread
    )


def removed_usages(cluster: str | None = None) -> list[ClusterUsage]:
    """Return the usage of removed clusters. cluster: only of those with this name. None: of all."""
    inventories = (inventory_if_known(Workspace.of(name)) for name in clusters_up())
    up = {each.cluster: each.cluster_id for each in inventories if each is not None}
    return [*saved_usages(up, cluster)]


def report_usage(
    usages: Sequence[ClusterUsage], by: Sequence[UsageGrouping], since: str
) -> UsageReport:
    """Return the usage of clusters together."""
    held = {each: None for usage in usages for each in usage.held}
    sources = sorted({usage.source for usage in usages})
    unread = sum(usage.unread for usage in usages)
    span = (parse_since(since), time.time())
    notes = tuple(dict.fromkeys(note for usage in usages for note in usage.notes))
    report = summarize_usage(held, by, span, source=", ".join(sources), unread=unread)
    return replace(report, notes=notes)


def usage_of_runs(
    by: Sequence[UsageGrouping], since: str, cluster: str | None = None
) -> UsageReport:
    """Return the usage by the runs that were collected on this machine. cluster: None: of all."""
    return report_usage([_usage_of_collected(cluster)], by, since)


def _usage_of_collected(cluster: str | None, tokens: Collection[str] | None = None) -> ClusterUsage:
    found = select_runs(RunQuery(cluster=cluster), everywhere=True)
    own = (row.run for row in found.rows if tokens is None or row.run.token in tokens)
    return ClusterUsage(
        cluster=cluster or "",
        source="runs",
        held=tuple(_held_by_runs(own)),
        notes=tuple(found.notes),
    )


def _held_by_runs(found: Iterable[RunRecord]) -> Iterator[AllocatedTime]:
    # A run may have copies.
    runs = {run.token: run for run in found}
    for run in runs.values():
        yield from _held_by_run(run)


def _held_by_run(run: RunRecord) -> Iterator[AllocatedTime]:
    for task in run.tasks:
        amounts = amounts_of(task.tres)
        for attempt in task.attempts:
            yield AllocatedTime(
                job=f"{run.token}/{task.id}",
                user=run.user,
                account=run.account,
                partition=run.partition,
                start=attempt.start_time,
                end=run.collected_at if attempt.end_time is None else attempt.end_time,
                nodes=len(attempt.nodes),
                cpus=amounts.get("cpu"),
                gpus=amounts.get(GPU, 0.0) if amounts else None,
                price=run.price_per_hour,
                suspended_s=attempt.suspended_s,
                cluster=run.cluster,
            )
