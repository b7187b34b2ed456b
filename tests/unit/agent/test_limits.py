"""Whether a call stays within the user's limits."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.journal import Bound, Call, History, JobUse
from clusterctl.agent.limits import DAY_S, Asked, LimitError, check, usage
from clusterctl.spec.agent import AgentLimits
from tests.support.messages import refused

FILE = Path("/home/ada/.config/clusterctl/config.yaml")
ASKED = Asked(
    verb="submit",
    cluster="demo",
    changes=True,
    submits=True,
    bound=Bound(1, 1.0, 0.0),
    accounts=[""],
)


BOUND = Bound(1, 2.0, 0.0)


def _call(number: int, bound: Bound = BOUND, **settings: Any) -> Call:
    call = Call(f"c{number}", time.time(), "submit", {}, "/p", "demo", bound)
    for name, value in settings.items():
        setattr(call, name, value)
    return call


def _history(*calls: Call, ends: str = "") -> History:
    outcomes = {"f": "failed", "c": "completed", "x": "cancelled"}
    return History({call.id: call for call in calls}, [outcomes[letter] for letter in ends])


def test_usage_counts_a_bound_until_all_jobs_have_ended() -> None:
    bound = Bound(2, 4.0, 8.0)
    ended = JobUse("completed", 0, 0.25, 0.5)
    half = _call(1, bound, code="ok", jobs=["1", "2"], uses={"1": ended, "2": JobUse("", 1)})
    whole = _call(2, bound, code="ok", jobs=["1", "2"], uses={"1": ended, "2": ended})
    assert usage(_history(half)).node_hours == 4.0
    assert usage(_history(half)).jobs == 1
    assert (usage(_history(whole)).node_hours, usage(_history(whole)).usd) == (0.5, 1.0)
    assert usage(_history(whole)).jobs == 0


def test_usage_of_a_day_forgets_older_calls_but_not_their_running_jobs() -> None:
    old = time.time() - DAY_S - 1
    running = _call(1, time=old, code="ok", jobs=["1"])
    killed = _call(2, time=old)
    assert usage(_history(running, killed)).node_hours == 0
    assert usage(_history(running, killed)).jobs == 1


def test_usage_of_a_killed_server_counts_for_a_day() -> None:
    used = usage(_history(_call(1, Bound(3, 6.0, 0.0))))
    assert (used.jobs, used.node_hours) == (3, 6.0)


def test_usage_unknown_real_use_keeps_the_bound() -> None:
    call = _call(1, jobs=["1"], uses={"1": JobUse("completed", 0, None, None)})
    assert usage(_history(call)).node_hours == 2.0


@pytest.mark.parametrize(("ends", "failures"), [("", 0), ("cff", 2), ("fxf", 2), ("ffc", 0)])
def test_failures_in_a_row_ignore_cancelled_jobs(ends: str, failures: int) -> None:
    assert usage(_history(ends=ends)).failures == failures


@pytest.mark.parametrize(
    ("settings", "asked", "history", "code"),
    [
        ({"verbs_off": ("submit",)}, {}, {}, "agent-verb-off"),
        ({"clusters": ("lab",)}, {}, {}, "agent-cluster"),
        ({"clusters": ()}, {}, {}, "agent-cluster"),
        ({}, {"here": False}, {}, "agent-cluster"),
        ({}, {"accounts": ["big"]}, {}, "agent-account"),
        ({"accounts": ("small",)}, {"accounts": [""]}, {}, "agent-account"),
        ({"accounts": ("small",)}, {"accounts": ["small", "big"]}, {}, "agent-account"),
        ({"commands_per_hour": 9}, {"commands": 9}, {}, "agent-commands"),
        ({"failures_in_a_row": 2}, {}, {"ends": "ff"}, "agent-failures"),
        ({"jobs_at_once": 4}, {"bound": Bound(5, 0.0, 0.0)}, {}, "agent-limit"),
        ({"node_hours_per_day": 8}, {"bound": Bound(1, 8.5, 0.0)}, {}, "agent-limit"),
        ({"usd_per_day": 1}, {"bound": Bound(1, 1.0, 1.5)}, {}, "agent-limit"),
        ({"usd_per_day": 1}, {"bound": Bound(1, 1.0, None)}, {}, "agent-bound-unknown"),
        ({}, {"bound": Bound(1, None, 0.0)}, {}, "agent-bound-unknown"),
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


@pytest.mark.parametrize("ends", ["", "f", "xxxxx", "fcf"])
def test_check_lets_a_call_within_all_limits_go(ends: str) -> None:
    limits = AgentLimits().model_copy(update={"failures_in_a_row": 2})
    check(limits, FILE, _history(ends=ends), ASKED)


def test_check_adds_what_other_calls_may_still_use() -> None:
    """The sum counts, not the single call: an agent may submit a thousand small jobs."""
    limits = AgentLimits().model_copy(update={"node_hours_per_day": 5})
    check(limits, FILE, _history(_call(1), _call(2)), ASKED)
    with refused("agent-limit", LimitError) as caught:
        check(limits, FILE, _history(_call(1), _call(2)), replace(ASKED, bound=Bound(1, 1.5, 0)))
    assert caught.value.answer["limit"] == {
        "name": "node_hours_per_day",
        "value": 5,
        "used": 4.0,
        "asked": 1.5,
    }


def test_check_lets_an_agent_read_and_cancel_over_its_limits() -> None:
    """Whoever has used up everything must still be able to look, and to stop jobs."""
    history = _history(_call(1, Bound(99, 999.0, 0.0)), ends="ffffffff")
    limits = AgentLimits()
    check(limits, FILE, history, Asked(verb="jobs", cluster="lab", here=False))
    check(limits, FILE, history, Asked(verb="cancel", cluster="demo", changes=True))


def test_check_with_unlimited_takes_unknown_bounds() -> None:
    limits = AgentLimits().model_copy(
        update={"node_hours_per_day": None, "usd_per_day": None, "jobs_at_once": None}
    )
    check(limits, FILE, _history(), replace(ASKED, bound=Bound(10**6, None, None)))
