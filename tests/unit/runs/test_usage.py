"""The hours and the cost of jobs, by user, account, partition and month."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from clusterctl.scheduler.slurm.usage import AllocatedTime, UsageGrouping, UsageRow, summarize_usage


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def held(start: str, end: str, job: str = "1", **fields: Any) -> AllocatedTime:
    usual = {"user": "ada", "account": "a", "partition": "gpu", "nodes": 2, "cpus": 8, "gpus": 4}
    return AllocatedTime(job=job, start=at(start), end=at(end), **{**usual, "price": 1.5, **fields})


ALL = (at("2026-01-01"), at("2026-12-31"))


def test_usage_counts_nodes_resources_and_prices() -> None:
    usage = summarize_usage(
        [
            held("2026-10-01T00:00", "2026-10-01T02:00"),
            held("2026-10-02T00:00", "2026-10-02T01:00"),
            held("2026-10-01T00:00", "2026-10-01T01:00", "2", user="bob", nodes=1, cpus=1, gpus=0),
        ],
        [UsageGrouping.USER],
        ALL,
        source="accounting",
    )
    assert usage.rows == (
        UsageRow(key=("ada",), jobs=1, node_hours=6, cpu_hours=24, gpu_hours=12, cost_usd=9),
        UsageRow(key=("bob",), jobs=1, node_hours=1, cpu_hours=1, gpu_hours=0, cost_usd=1.5),
    )
    assert usage.total == UsageRow(
        key=("",), jobs=2, node_hours=7, cpu_hours=25, gpu_hours=12, cost_usd=10.5
    )


def test_suspended_time_is_not_used() -> None:
    times = "2026-10-31T23:00", "2026-11-01T01:00"
    usage = summarize_usage(
        [held(*times, suspended_s=1800)], [UsageGrouping.MONTH], ALL, source="accounting"
    )
    assert [row.node_hours for row in usage.rows] == [1.5, 1.5]
    assert usage.total.cost_usd == 4.5


def test_usage_of_unknown_resources_is_unknown_for_their_group_alone() -> None:
    usage = summarize_usage(
        [
            held("2026-10-01T00:00", "2026-10-01T02:00"),
            held("2026-10-01T00:00", "2026-10-01T01:00", "2", user="bob", cpus=None, price=None),
        ],
        [UsageGrouping.USER],
        ALL,
        source="runs",
    )
    figures = [(row.cpu_hours, row.gpu_hours, row.cost_usd) for row in (*usage.rows, usage.total)]
    assert figures == [(16, 8, 6), (None, 4, None), (None, 12, None)]


def test_usage_by_month_divides_jobs_at_the_turn_of_the_month() -> None:
    """The job ran from an hour before the turn of the year until two hours after it."""
    span = (at("2025-01-01"), at("2027-12-31"))
    job = held("2026-12-31T23:00", "2027-01-01T02:00")
    usage = summarize_usage(
        [job], [UsageGrouping.PARTITION, UsageGrouping.MONTH], span, source="accounting"
    )
    rows = [(row.key, row.jobs, row.node_hours) for row in usage.rows]
    assert rows == [(("gpu", "2026-12"), 1, 2), (("gpu", "2027-01"), 1, 4)]
    assert (usage.total.jobs, usage.total.node_hours) == (1, 6)


@pytest.mark.parametrize(
    ("first", "last", "hours"),
    [
        ("2026-10-01T00:00", "2026-10-02T00:00", 4),
        ("2026-10-01T01:00", "2026-10-02T00:00", 2),
        ("2026-10-01T00:00", "2026-10-01T00:30", 1),
        ("2026-10-01T03:00", "2026-10-02T00:00", 0),
    ],
)
def test_usage_counts_only_the_time_asked_for(first: str, last: str, hours: float) -> None:
    job = held("2026-10-01T00:00", "2026-10-01T02:00")
    usage = summarize_usage(
        [job], [UsageGrouping.ACCOUNT], (at(first), at(last)), source="accounting"
    )
    assert usage.total.node_hours == hours
    assert [row.node_hours for row in usage.rows] == ([hours] if hours else [])


def test_job_that_ended_within_a_second_counts() -> None:
    jobs = [held("2026-10-01T00:00", "2026-10-01T00:00", job) for job in ("1", "2")]
    usage = summarize_usage(
        jobs, [UsageGrouping.USER, UsageGrouping.MONTH], ALL, source="accounting"
    )
    assert [(row.key, row.jobs) for row in usage.rows] == [(("ada", "2026-10"), 2)]
    assert usage.total.node_hours == 0
