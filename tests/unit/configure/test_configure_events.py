"""Failures of a playbook become one clear failure a host."""

from __future__ import annotations

from typing import Any

from clusterctl.configure.events import Status, failures_of, progress_of


def event(host: str, *, kind: str = "runner_on_failed", role: str = "slurmd", **res: Any) -> dict[str, Any]:
    data = {"host": host, "task": "Run slurmd", "role": role, "play": "Configure the nodes", "res": res}
    return {"event": kind, "event_data": data}


def test_the_first_failure_of_each_host_counts() -> None:
    failures = failures_of([event("a", msg="first"), event("a", msg="second"), event("b", msg="third")])
    assert [(f.host, f.cause) for f in failures] == [("a", "first"), ("b", "third")]
    assert failures[0].phase == "slurmd / Run slurmd"
    assert "journalctl" in failures[0].fix


def test_message_and_stderr_are_joined_without_repeating() -> None:
    (failure,) = failures_of(
        [event("a", msg="non-zero return code", stderr="no such key", stdout="no such key")]
    )
    assert failure.cause == "non-zero return code\nno such key"


def test_a_loop_shows_the_item_that_failed() -> None:
    results = [{"failed": False, "msg": "fine"}, {"failed": True, "msg": "uid 10001 is taken"}]
    (failure,) = failures_of([event("a", msg="One or more items failed", results=results)])
    assert failure.cause == "uid 10001 is taken"


def test_a_loop_shows_the_item_that_did_not_reach_the_host() -> None:
    results = [{"unreachable": False, "msg": "fine"}, {"unreachable": True, "msg": "connection refused"}]
    (failure,) = failures_of([event("a", msg="All items completed", results=results)])
    assert failure.cause == "connection refused"


def test_what_no_log_hides_stays_hidden() -> None:
    (failure,) = failures_of([event("a", censored="the output has been hidden", msg="SECRET")])
    assert failure.cause == "the output has been hidden"


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
    assert str(progress) == "a: slurmd: Run slurmd"
