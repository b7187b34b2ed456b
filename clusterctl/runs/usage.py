"""What jobs used of a cluster, from Slurm's accounting or, without accounting, from the runs that
were collected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from clusterctl.providers.registry import provider_of
from clusterctl.runs.query import RunQuery, parse_since, select_runs
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.usage import (
    AllocatedTime,
    UsageGrouping,
    UsageReport,
    summarize_usage,
    usage_of_jobs,
)
from clusterctl.scheduler.slurm.values import GPU, amounts_of
from clusterctl.state.run_record import RunRecord


def usage_of_cluster(session: Session, by: Sequence[UsageGrouping], since: str) -> UsageReport:
    """Return the usage of a cluster by its accounting or, without accounting, by collected runs.

    Raises AccountingAwayError if the accounting does not answer.
    """
    first = parse_since(since)
    jobs = session.scheduler.history(int(first))
    if jobs is None:
        return usage_of_runs(by, since, session.inventory.cluster)
    spec = session.spec
    provider = provider_of(spec.provider)
    return usage_of_jobs(jobs, by, first, lambda name: provider.node_price(spec, name))


def usage_of_runs(
    by: Sequence[UsageGrouping], since: str, cluster: str | None = None
) -> UsageReport:
    """Return the usage by the runs that were collected on this machine. cluster: None: of all."""
    first = parse_since(since)
    found = select_runs(RunQuery(cluster=cluster), everywhere=True)
    # A run may have copies.
    runs = {row.run.token: row.run for row in found.rows}
    held = [each for run in runs.values() for each in _held_by_run(run)]
    usage = summarize_usage(held, by, (first, time.time()), source="runs")
    return replace(usage, notes=found.notes)


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
            )
