"""What jobs used of clusters, by user, account, partition, cluster or month: hours and cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache

from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.slurm.values import GPU, amounts_of
from clusterctl.spec.names import reject_unknown

_HOUR_S = 3600


class UsageGrouping(StrEnum):
    """What usage is grouped by. Months are in UTC."""

    USER = "user"
    ACCOUNT = "account"
    PARTITION = "partition"
    CLUSTER = "cluster"
    MONTH = "month"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedTime:
    """A time in which a job held nodes, from ``start`` to ``end`` in Unix seconds.

    job: distinguishes it from all other jobs. price: of a node, in USD an hour. None: unknown.
    suspended_s: seconds of it in which other jobs had the nodes.
    """

    job: str
    user: str
    account: str
    partition: str
    start: float
    end: float
    nodes: int
    cpus: float | None = None
    gpus: float | None = None
    price: float | None = None
    suspended_s: float = 0.0
    cluster: str = ""

    @property
    def month(self) -> str:
        return f"{datetime.fromtimestamp(self.start, UTC):%Y-%m}"

    @property
    def hours(self) -> float:
        return max(0.0, self.end - self.start - self.suspended_s) / _HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """The usage of a group. key: a value for each of ``UsageGrouping``. None: unknown of some of its jobs.

    A node that jobs share counts in full in node_hours and cost_usd.
    """

    key: tuple[str, ...]
    jobs: int
    node_hours: float
    cpu_hours: float | None
    gpu_hours: float | None
    cost_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """The usage since a time (Unix seconds), the largest first, and of all together.

    source: accounting, runs, or both. unread: the number of records that can't be read.
    notes: lines for the user about damaged records of runs.
    """

    source: str
    since: float
    by: tuple[UsageGrouping, ...]
    rows: tuple[UsageRow, ...]
    total: UsageRow
    unread: int = 0
    notes: tuple[str, ...] = ()


def usage_keys(names: Sequence[str]) -> list[UsageGrouping]:
    """Return the keys with these names. Raises UsageError for other names."""
    reject_unknown(names, list(UsageGrouping), "usage can't be grouped by")
    return [UsageGrouping(name) for name in dict.fromkeys(names)]


def held_by_jobs(
    jobs: Sequence[JobInfo], cluster: str, cluster_id: str, price: Callable[[str], float | None]
) -> Iterator[AllocatedTime]:
    """Yield the times in which jobs in the accounting of a cluster held nodes.

    cluster_id: distinguishes the cluster from others of its name. price: returns the price of a
        partition's node, in USD an hour.
    """
    now = time.time()
    known = cache(price)
    for job in jobs:
        for each in _held_by_job(job, now, known):
            yield replace(each, cluster=cluster, job=f"{cluster_id}/{job.id}")


def summarize_usage(
    held: Iterable[AllocatedTime],
    by: Sequence[UsageGrouping],
    span: tuple[float, float],
    *,
    source: str,
    unread: int = 0,
) -> UsageReport:
    """Return the usage within a span of time, grouped by these keys."""
    parts = [part for each in held for part in _within(each, span, split=UsageGrouping.MONTH in by)]
    groups: dict[tuple[str, ...], list[AllocatedTime]] = {}
    for part in parts:
        groups.setdefault(tuple(getattr(part, key.value) for key in by), []).append(part)
    rows = [_row(key, group) for key, group in groups.items()]
    rows.sort(key=lambda row: (-row.node_hours, row.key))
    if UsageGrouping.MONTH in by:
        rows.sort(key=lambda row: row.key[[*by].index(UsageGrouping.MONTH)])
    return UsageReport(
        source=source,
        since=span[0],
        by=tuple(by),
        rows=tuple(rows),
        total=_row(("",) * len(by), parts),
        unread=unread,
    )


def _held_by_job(
    job: JobInfo, now: float, price: Callable[[str], float | None]
) -> Iterator[AllocatedTime]:
    amounts = amounts_of(job.tres)
    for attempt in job.attempts:
        yield AllocatedTime(
            job=job.id,
            user=job.user,
            account=job.account,
            partition=job.partition,
            start=attempt.start_time,
            end=now if attempt.end_time is None else attempt.end_time,
            nodes=len(attempt.nodes),
            cpus=amounts.get("cpu"),
            gpus=amounts.get(GPU, 0.0) if amounts else None,
            price=price(job.partition),
            suspended_s=attempt.suspended_s,
        )


def _within(
    held: AllocatedTime, span: tuple[float, float], *, split: bool
) -> Iterator[AllocatedTime]:
    """Yield the part of a time within a span, in parts of a month each if ``split``."""
    start, end = max(held.start, span[0]), min(held.end, span[1])
    if start == end == held.start:
        # A job that ended within a second counts as a job.
        yield replace(held, end=end)
    while start < end:
        until = min(end, _next_month(start)) if split else end
        # Nothing tells when in a time it was suspended.
        share = (until - start) / (held.end - held.start)
        yield replace(held, start=start, end=until, suspended_s=share * held.suspended_s)
        start = until


def _next_month(time_s: float) -> float:
    """Return the end of a time's month in UTC, in Unix seconds."""
    at = datetime.fromtimestamp(time_s, UTC)
    return datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC).timestamp()


def _row(key: tuple[str, ...], held: Sequence[AllocatedTime]) -> UsageRow:
    def hours(amounts: Iterable[float | None]) -> float | None:
        sums = [
            math.nan if amount is None else amount * each.hours
            for amount, each in zip(amounts, held, strict=True)
        ]
        total = math.fsum(sums)
        return None if math.isnan(total) else total

    prices = [None if each.price is None else each.price * each.nodes for each in held]
    return UsageRow(
        key=key,
        jobs=len({each.job for each in held}),
        node_hours=math.fsum(each.nodes * each.hours for each in held),
        cpu_hours=hours(each.cpus for each in held),
        gpu_hours=hours(each.gpus for each in held),
        cost_usd=hours(prices),
    )
