"""Whether a call stays within the user's limits."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.journal import CallBound, History, Journal, RecordedCall
from clusterctl.agent.limits import DAY_S, CallCluster, RequestedCall, check, keep_uses, usage, uses
from clusterctl.spec.agent import AgentLimits
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.util.confine import LimitError
from tests.support.messages import refused

FILE = Path("/home/ada/.config/clusterctl/config.yaml")
ASKED = RequestedCall(
    verb="submit",
    place=CallCluster("demo"),
    changes=True,
    submits=True,
    bound=CallBound(1, 1.0, 0.0),
    accounts=[""],
)


BOUND = CallBound(1, 2.0, 0.0)


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The jobs of the cluster `demo`, which is up."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    workspace = Workspace.of("demo")
    workspace.root.mkdir()
    return Ledger(workspace.jobs)


def _call(number: int, bound: CallBound = BOUND, **settings: Any) -> RecordedCall:
    call = RecordedCall(f"c{number}", time.time(), "submit", {}, "/p", "demo new", bound)
    for name, value in settings.items():
        setattr(call, name, value)
    return call


def _history(*calls: RecordedCall, failed: int = 0) -> History:
    """A history with so many failed jobs before a cluster was removed."""
    return History({call.id: call for call in calls}, [(time.time(), failed)])


def _job(ledger: Ledger, job_id: str, state: str = "", **changes: Any) -> None:
    """Add a job to the ledger, of which Slurm has told the final state, if there is one."""
    number = len(ledger.entries())
    entry = ledger.add(
        JobEntry(token=f"t{number}", name="job", user="ada", submitted_at=time.time())
    )
    ends: dict[str, Any] = {"state": state, "state_at": time.time() + number} if state else {}
    ledger.update(entry, job_id=job_id, **ends, **changes)


def test_usage_counts_a_bound_until_all_jobs_have_ended(ledger: Ledger) -> None:
    call = _call(1, CallBound(2, 4.0, 8.0), code="ok", jobs=["1", "2"])
    _job(ledger, "1", "COMPLETED", node_hours=0.25)
    _job(ledger, "2")
    assert usage(_history(call)).node_hours == 4.0
    assert usage(_history(call)).jobs == 2
    ledger.update(ledger.entries()[1], state="FAILED", state_at=time.time(), node_hours=0.25)
    used = usage(_history(call))
    assert (used.node_hours, used.usd, used.jobs) == (0.5, 1.0, 0)


def test_usage_of_a_day_forgets_older_calls_but_not_their_running_jobs(ledger: Ledger) -> None:
    old = time.time() - DAY_S - 1
    running = _call(1, CallBound(1, 2.0, 0.0), time=old, code="ok", jobs=["1"])
    _job(ledger, "1")
    killed = _call(2, time=old)
    assert usage(_history(running, killed)).node_hours == 0
    assert usage(_history(running, killed)).jobs == 1


def test_usage_of_a_killed_server_counts_for_a_day() -> None:
    used = usage(_history(_call(1, CallBound(3, 6.0, 0.0))))
    assert (used.jobs, used.node_hours) == (3, 6.0)


def test_usage_unknown_real_use_keeps_the_bound(ledger: Ledger) -> None:
    _job(ledger, "1", "COMPLETED")
    assert usage(_history(_call(1, jobs=["1"]))).node_hours == 2.0


def test_usage_of_a_removed_cluster_keeps_the_bound_and_no_jobs(ledger: Ledger) -> None:
    gone = _call(1, jobs=["1"], cluster="demo 0a1b")
    _job(ledger, "1")
    assert (usage(_history(gone)).jobs, usage(_history(gone)).node_hours) == (0, 2.0)


def test_removed_cluster_leaves_what_its_jobs_have_used_and_how_many_failed(
    ledger: Ledger,
) -> None:
    ledger.workspace.adopt_id("abc123")
    journal = Journal()
    bound = CallBound(1, 4.0, 8.0)
    with journal.lock():
        call = journal.begin("submit", {}, project="/p", cluster="demo abc123", bound=bound)
    journal.end(call, "ok", jobs=["1"], seconds=1, free=False)
    _job(ledger, "1", "FAILED", node_hours=0.25)
    keep_uses(ledger.workspace)
    ledger.workspace.remove()
    used = usage(Journal().read())
    assert (used.node_hours, used.usd, used.jobs, used.failures) == (0.25, 0.5, 0, 1)


def test_ledger_is_read_once_for_all_calls(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        _job(ledger, str(number), "COMPLETED", node_hours=0.5)
    read = []
    entries = Ledger.entries
    monkeypatch.setattr(Ledger, "entries", lambda self: read.append(self) or entries(self))
    found = uses(_call(number, jobs=[str(number)]) for number in range(3))
    assert [use.node_hours for use in found.values()] == [0.5] * 3
    assert len(read) == 1


def test_usage_job_with_the_number_of_an_earlier_one_is_another(ledger: Ledger) -> None:
    """Slurm may have begun its numbers again: an old job tells nothing of the agent's."""
    _job(ledger, "1", "COMPLETED", node_hours=0.1)
    call = _call(1, jobs=["1"], time=time.time() + 60)
    assert usage(_history(call)).jobs == 1


@pytest.mark.parametrize(
    ("ends", "failures"),
    [
        ("", 0),
        ("COMPLETED FAILED TIMEOUT", 2),
        ("FAILED CANCELLED OUT_OF_MEMORY", 2),
        ("FAILED FAILED COMPLETED", 0),
    ],
)
def test_failures_in_a_row_ignore_cancelled_jobs(ledger: Ledger, ends: str, failures: int) -> None:
    states = ends.split()
    jobs = [str(number) for number, _ in enumerate(states)]
    for job, state in zip(jobs, states, strict=True):
        _job(ledger, job, state)
    assert usage(History({"c": _call(1, jobs=jobs)})).failures == failures


def test_array_with_a_completed_task_has_not_failed(ledger: Ledger) -> None:
    _job(ledger, "1", "FAILED", task_states="COMPLETED:0 FAILED:1-3")
    assert usage(History({"c": _call(1, jobs=["1"])})).failures == 0


def test_failures_before_a_cluster_was_removed_count_on(ledger: Ledger) -> None:
    _job(ledger, "1", "FAILED")
    history = History({"c": _call(1, jobs=["1"])}, [(time.time() - 9, 4)])
    assert usage(history).failures == 5


@pytest.mark.parametrize(
    ("settings", "asked", "history", "code"),
    [
        ({"verbs_off": ("submit",)}, {}, {}, "agent-verb-off"),
        ({"clusters": ("lab",)}, {}, {}, "agent-cluster"),
        ({"clusters": ()}, {}, {}, "agent-cluster"),
        ({}, {"place": CallCluster("demo", here=False)}, {}, "agent-cluster"),
        ({}, {"accounts": ["big"]}, {}, "agent-account"),
        ({"accounts": ("small",)}, {"accounts": [""]}, {}, "agent-account"),
        ({"accounts": ("small",)}, {"accounts": ["small", "big"]}, {}, "agent-account"),
        (
            {"commands_per_hour": 9},
            {"place": CallCluster("demo", commands=9)},
            {},
            "agent-commands",
        ),
        ({"failures_in_a_row": 2}, {}, {"failed": 2}, "agent-failures"),
        ({"jobs_at_once": 4}, {"bound": CallBound(5, 0.0, 0.0)}, {}, "agent-limit"),
        ({"node_hours_per_day": 8}, {"bound": CallBound(1, 8.5, 0.0)}, {}, "agent-limit"),
        ({"usd_per_day": 1}, {"bound": CallBound(1, 1.0, 1.5)}, {}, "agent-limit"),
        (
            {},
            {"verb": "up", "submits": False, "bound": CallBound(0, 0.0, 0.0, 17)},
            {},
            "agent-limit",
        ),
        ({"usd_per_day": 1}, {"bound": CallBound(1, 1.0, None)}, {}, "agent-bound-unknown"),
        ({}, {"bound": CallBound(1, None, 0.0)}, {}, "agent-bound-unknown"),
    ],
)
def test_check_refuses_what_a_limit_forbids(
    settings: dict[str, Any], asked: dict[str, Any], history: dict[str, Any], code: str
) -> None:
    limits = AgentLimits().model_copy(update=settings)
    with refused(code, LimitError) as caught:
        check(limits, FILE, _history(**history), replace(ASKED, **asked))
    limit = caught.value.answer["limit"]
    assert limit["name"] in AgentLimits.model_fields
    assert "value" in limit


def test_check_lets_a_call_within_all_limits_go() -> None:
    limits = AgentLimits().model_copy(update={"failures_in_a_row": 2})
    check(limits, FILE, _history(failed=1), ASKED)


def test_check_adds_what_other_calls_may_still_use() -> None:
    """The sum counts, not the single call: an agent may submit a thousand small jobs."""
    limits = AgentLimits().model_copy(update={"node_hours_per_day": 5})
    check(limits, FILE, _history(_call(1), _call(2)), ASKED)
    with refused("agent-limit", LimitError) as caught:
        check(
            limits, FILE, _history(_call(1), _call(2)), replace(ASKED, bound=CallBound(1, 1.5, 0))
        )
    assert caught.value.answer["limit"] == {
        "name": "node_hours_per_day",
        "value": 5,
        "used": 4.0,
        "asked": 1.5,
    }


def test_check_lets_an_agent_read_and_cancel_over_its_limits() -> None:
    """Whoever has used up everything must still be able to look, and to stop jobs."""
    history = _history(_call(1, CallBound(99, 999.0, 0.0)), failed=8)
    limits = AgentLimits()
    check(limits, FILE, history, RequestedCall(verb="jobs", place=CallCluster("lab", here=False)))
    check(
        limits, FILE, history, RequestedCall(verb="cancel", place=CallCluster("demo"), changes=True)
    )


def test_check_with_unlimited_takes_unknown_bounds() -> None:
    limits = AgentLimits().model_copy(
        update={"node_hours_per_day": None, "usd_per_day": None, "jobs_at_once": None}
    )
    check(limits, FILE, _history(), replace(ASKED, bound=CallBound(10**6, None, None)))
