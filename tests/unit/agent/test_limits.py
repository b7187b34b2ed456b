"""What commands of agents may use, by the journal."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from clusterctl.agent import limits
from clusterctl.agent.journal import Journal
from clusterctl.agent.limits import DAY_S, check_use, node_hours_of_day
from clusterctl.errors import ClusterctlError
from clusterctl.util.confine import VARIABLE, Asked, Confinement, LimitError
from tests.support.messages import refused


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))


def begin(monkeypatch: pytest.MonkeyPatch, node_hours: float | None) -> str:
    """Begin a call with this limit of node hours. Return its id."""
    call = Journal().begin("submit", {}, project="/p")
    confined = Confinement(("/p",), node_hours=node_hours, call=call)
    monkeypatch.setenv(VARIABLE, confined.environ[VARIABLE])
    return call


def used() -> float:
    return node_hours_of_day(Journal().calls().values())


def test_check_use_reserves_until_the_sum_exceeds_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum counts, not the single call: an agent may submit a thousand small jobs."""
    for _ in range(2):
        begin(monkeypatch, 5)
        check_use(Asked(node_hours=2.0))
        check_use(Asked(node_hours=2.0), reserves=True)
    begin(monkeypatch, 5)
    with refused("agent-limit", LimitError) as caught:
        check_use(Asked(node_hours=1.5), reserves=True)
    assert caught.value.answer["limit"] == {
        "name": "node_hours",
        "value": 5,
        "used": 4.0,
        "asked": 1.5,
    }
    assert used() == 4.0


def test_check_use_of_several_at_once_does_not_exceed_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [begin(monkeypatch, 3) for _ in range(10)]
    limit = Confinement(("/p",), node_hours=3)
    refusals: list[str] = []

    def ask(call: str) -> None:
        confined = Confinement(limit.folders, node_hours=3, call=call)
        mine.confined = confined
        try:
            check_use(Asked(node_hours=1.0), reserves=True)
        except ClusterctlError as exc:
            refusals.append(exc.code)

    mine = threading.local()
    monkeypatch.setattr(limits, "confinement", lambda: mine.confined)
    threads = [threading.Thread(target=ask, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals == ["agent-limit"] * 7
    assert used() == 3.0


def test_check_use_counts_for_a_day_and_nothing_of_a_call_that_submitted_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = begin(monkeypatch, 5)
    check_use(Asked(node_hours=2.0), reserves=True)
    assert used() == 2.0
    now = limits.time.time()
    monkeypatch.setattr(limits.time, "time", lambda: now + DAY_S + 1)
    assert used() == 0.0
    monkeypatch.undo()
    Journal().end(call, "slurm-refused", jobs=[], seconds=1, free=True)
    assert used() == 0.0


def test_check_use_takes_unknown_node_hours_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = begin(monkeypatch, None)
    check_use(Asked(node_hours=None), reserves=True)
    assert Journal().calls()[call].node_hours is None
    assert used() == 0.0


def test_check_use_lets_the_user_do_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_use(Asked(nodes=None, time_s=None, node_hours=None), reserves=True)
    assert Journal().calls() == {}
