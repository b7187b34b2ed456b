"""What check mode says of changes to come: tasks with the lines of files, and never a secret."""

from __future__ import annotations

from typing import Any

from clusterctl.configure.events import Status, progress_of


def event(**result: Any) -> dict[str, Any]:
    data = {"host": "gpu1", "task": "Place it", "role": "munge", "res": {"changed": True, **result}}
    return {"event": "runner_on_ok", "event_data": data}


def test_a_changed_file_is_shown_as_a_difference() -> None:
    diff = {"before": "a\nb\n", "after": "a\nc\n", "before_header": "/etc/x", "after_header": "new"}
    found = progress_of(event(diff=[diff]))
    assert found is not None
    assert (found.host, found.role, found.task) == ("gpu1", "munge", "Place it")
    assert found.diff.splitlines() == ["--- /etc/x", "+++ new", "@@ -1,2 +1,2 @@", " a", "-b", "+c"]


def test_items_that_change_are_shown_and_others_are_not() -> None:
    one = {"changed": True, "diff": {"before": "", "after": "x\n"}}
    other = {"changed": False, "diff": {"before": "", "after": "y\n"}}
    found = progress_of(event(results=[one, other]))
    assert found is not None
    assert "+x" in found.diff
    assert "y" not in found.diff.splitlines()


def test_a_secret_is_told_without_its_lines() -> None:
    found = progress_of(event(censored="hidden", diff=[{"before": "", "after": "the key\n"}]))
    assert found is not None
    assert found.diff == ""


def test_what_stays_and_what_fails_is_not_a_pending_change() -> None:
    stays, fails = progress_of(event(changed=False)), progress_of({**event(), "event": "runner_on_failed"})
    assert stays is not None
    assert fails is not None
    assert Status.CHANGED not in (stays.status, fails.status)


def test_a_very_long_difference_is_cut() -> None:
    found = progress_of(event(diff={"before": "", "after": "line\n" * 1000}))
    assert found is not None
    assert found.diff.splitlines()[-1].startswith("... and ")
    assert len(found.diff.splitlines()) < 250
