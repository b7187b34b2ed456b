"""The budget of a month: `submit` warns when it is nearly spent, and refuses when it is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.budget import check_budget
from clusterctl.jobs.prepare import Preparer, Submission
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.usage import month_start
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import BudgetFacts
from tests.support.inventories import with_inventory
from tests.support.messages import refused
from tests.support.played.cluster import PlayedCluster

_RAN_S = 36


def used(cluster: PlayedCluster, hours: float, **budget: float) -> Session:
    """Return a session with a cluster whose only job of this month has used so many node hours and
    four times as many GPU hours.
    """
    while time.time() - month_start(time.time()) < _RAN_S:
        # The job would last beyond the first seconds of the month.
        time.sleep(1)
    first = int(month_start(time.time()))
    nodes = round(hours * 3600 / _RAN_S)
    job = {
        "state": "COMPLETED", "dir": "/x", "name": "train", "comment": "", "reason": "",
        "code": 0, "signal": 0, "forgotten": True, "user": "bob", "nodes": f"n[1-{nodes}]",
        "submit": first, "start": first, "end": first + _RAN_S,
        "AllocTRES": f"cpu={nodes},gres/gpu={4 * nodes},node={nodes}",
    }  # fmt: skip
    with cluster.state() as state:
        state["jobs"]["1"] = job
    return with_inventory(cluster.session(), budget=BudgetFacts(**budget))


@pytest.mark.parametrize(
    ("hours", "budget", "code"),
    [
        pytest.param(79, {"node_hours": 100}, None, id="enough"),
        pytest.param(80, {"node_hours": 100}, "budget-nearly-spent", id="nearly spent"),
        pytest.param(21, {"node_hours": 100, "gpu_hours": 100}, "budget-nearly-spent", id="GPUs"),
        pytest.param(1, {"cost_usd": 100}, "budget-unchecked", id="prices unknown"),
        pytest.param(99, {}, None, id="no budget"),
    ],
)
def test_budget_warns_from_80_percent_on(
    cluster: PlayedCluster, hours: float, budget: dict[str, float], code: str | None
) -> None:
    notes: list[Any] = []
    check_budget(used(cluster, hours, **budget), notes.append)
    assert [note.code for note in notes] == ([code] if code else [])


def test_spent_budget_refuses_a_job(cluster: PlayedCluster, tmp_path: Any) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    job = JobSpec(name="mine", script=tmp_path / "job.sh")
    session = used(cluster, 25, gpu_hours=100)
    with refused("budget-spent", UsageError, "100 of 100"):
        Preparer(lambda _: None).prepare(session, Submission.of([job]))
    assert cluster.calls("sbatch") == 0


def test_budget_without_an_answer_of_the_accounting_is_not_checked(cluster: PlayedCluster) -> None:
    session = used(cluster, 1000, node_hours=1)
    with cluster.state() as state:
        state["accounting_away"] = True
    notes: list[Any] = []
    check_budget(session, notes.append)
    assert [note.code for note in notes] == ["budget-unchecked"]


def test_budget_asks_nothing_if_there_is_none(cluster: PlayedCluster) -> None:
    check_budget(used(cluster, 1000), lambda _: None)
    assert cluster.calls("sacct") == 0
