"""Failures of a playbook become one clear failure a host."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.configure.events import Status, failures_of, progress_of

TASK = "Run slurmd"
TAKEN = "uid 10001 is taken"
HIDDEN = "the output has been hidden"


def event(host: str, *, kind: str = "runner_on_failed", **res: Any) -> dict[str, Any]:
    data = {"host": host, "task": TASK, "role": "slurmd", "play": "Configure the nodes", "res": res}
    return {"event": kind, "event_data": data}


def test_the_first_failure_of_each_host_counts() -> None:
    failures = failures_of([event("a", msg="first"), event("a", msg="second"), event("b", msg="third")])
    assert [(f.host, f.cause) for f in failures] == [("a", "first"), ("b", "third")]
    assert failures[0].phase == f"slurmd / {TASK}"
    assert "journalctl" in failures[0].fix


def test_message_and_stderr_are_joined_without_repeating() -> None:
    (failure,) = failures_of([event("a", msg="non-zero", stderr="no such key", stdout="no such key")])
    assert failure.cause.splitlines() == ["non-zero", "no such key"]


@pytest.mark.parametrize("how", ["failed", "unreachable"])
def test_a_loop_shows_the_item_that_failed_or_did_not_reach_the_host(how: str) -> None:
    results = [{how: False, "msg": "fine"}, {how: True, "msg": TAKEN}]
    (failure,) = failures_of([event("a", msg="All items completed", results=results)])
    assert failure.cause == TAKEN


def test_what_no_log_hides_stays_hidden() -> None:
    (failure,) = failures_of([event("a", censored=HIDDEN, msg="SECRET")])
    assert failure.cause == HIDDEN


def test_a_failure_that_the_play_ignores_is_none() -> None:
    ignored = event("a", msg="whatever")
    ignored["event_data"]["ignore_errors"] = True
    assert failures_of([ignored]) == ()
    assert progress_of(ignored) is None


def test_unreachable_hosts_can_be_tried_again() -> None:
    (failure,) = failures_of([event("a", kind="runner_on_unreachable", msg="timed out")])
    assert (failure.code, failure.retryable) == ("unreachable", True)


def test_a_long_cause_keeps_its_end() -> None:
    (failure,) = failures_of([event("a", msg="x" * 5000 + "the point")])
    assert failure.cause.endswith("the point")
    assert len(failure.cause) < 2000


def test_a_changed_task_is_told_as_changed() -> None:
    progress = progress_of(event("a", kind="runner_on_ok", changed=True))
    assert progress is not None
    assert progress.status is Status.CHANGED
    assert str(progress) == f"a: slurmd: {TASK}"
