"""Playbook events become one failure per host, and the diff of check mode shows no secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.configure import ansible
from clusterctl.configure.events import TaskResult, TaskStatus, failures_of, result_of
from clusterctl.errors import ConfigureError
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Reporter
from tests.support.inventories import CTL, INVENTORY

TASK = "Run slurmd"
TAKEN = "uid 10001 is taken"
HIDDEN = "the output has been hidden"


def event(host: str, *, kind: str = "failed", **result: Any) -> dict[str, Any]:
    return {"event": kind, "host": host, "task": TASK, "role": "slurmd", "of": 1, "result": result}


def test_failures_of_has_the_first_failure_of_each_host() -> None:
    failures = failures_of(
        [event("a", msg="first"), event("a", msg="second"), event("b", msg="third")]
    )
    assert [(f.host, f.cause) for f in failures] == [("a", "first"), ("b", "third")]
    assert failures[0].phase == f"slurmd / {TASK}"
    assert "journalctl" in failures[0].fix


def test_last_line_of_a_message_is_its_fix() -> None:
    (failure,) = failures_of([event("a", msg="a is wrong\nfix: correct a")])
    assert (failure.cause, failure.fix) == ("a is wrong", "correct a")


def test_message_and_stderr_are_joined_without_repeating() -> None:
    (failure,) = failures_of(
        [event("a", msg="non-zero", stderr="no such key", stdout="no such key")]
    )
    assert failure.cause.splitlines() == ["non-zero", "no such key"]


@pytest.mark.parametrize("how", ["failed", "unreachable"])
def test_loop_shows_the_item_that_failed_or_was_unreachable(how: str) -> None:
    results = [{how: False, "msg": "fine"}, {how: True, "msg": TAKEN}]
    (failure,) = failures_of([event("a", msg="All items completed", results=results)])
    assert failure.cause == TAKEN


def test_failure_under_no_log_is_hidden() -> None:
    (failure,) = failures_of([event("a", censored=HIDDEN, msg="SECRET")])
    assert failure.cause == HIDDEN


def test_unreachable_hosts_can_be_tried_again() -> None:
    (failure,) = failures_of([event("a", kind="unreachable", msg="timed out")])
    assert (failure.code, failure.retryable) == ("unreachable", True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "unreachable",
            "Mitogen was disconnected from the remote environment while a call was in-progress. If "
            "you feel this is in error, please file a bug. Original error was: the respondent "
            "Context has disconnected",
        ),
        # Of a machine that was switched off.
        ("failed", "Task failed: the respondent Context has disconnected"),
    ],
)
def test_lost_connection_is_not_a_bug_to_report(kind: str, message: str) -> None:
    (failure,) = failures_of([event("a", kind=kind, msg=message)])
    assert (failure.code, failure.retryable) == ("unreachable", True)
    assert "disconnected" not in failure.cause


def test_repository_that_dnf_can_not_read_is_named_in_the_fix() -> None:
    """The message is Ansible's with dnf 4.14, for a repository whose server has no address."""
    cause = (
        "Failed to download metadata for repo 'site-updates': Cannot download repomd.xml: "
        "Cannot download repodata/repomd.xml: All mirrors were tried"
    )
    (failure,) = failures_of([event("a", msg=cause, rc=1, results=[])])
    assert (failure.about, failure.cause) == ("repository", cause)
    assert "--repo=site-updates`" in failure.fix


def test_long_cause_keeps_its_end() -> None:
    (failure,) = failures_of([event("a", msg="x" * 5000 + "the point")])
    assert failure.cause.endswith("the point")
    assert len(failure.cause) < 2000


def test_result_of_a_changed_task_is_changed() -> None:
    task = result_of(event("a", kind="changed"))
    assert task is not None
    assert task.how == TaskStatus.CHANGED
    assert str(task) == f"a: slurmd: {TASK}"
    assert task.of == 1


def diff_of(**result: Any) -> list[str]:
    """Return the lines that check mode shows of a changed task."""
    found = result_of(event("gpu1", kind="changed", **result))
    assert found is not None
    return found.diff.splitlines()


def test_diff_shows_a_changed_file() -> None:
    diff = {"before": "a\nb\n", "after": "a\nc\n", "before_header": "/etc/x", "after_header": "new"}
    assert diff_of(diff=[diff]) == ["--- /etc/x", "+++ new", "@@ -1,2 +1,2 @@", " a", "-b", "+c"]


def test_diff_shows_only_changed_items() -> None:
    one = {"changed": True, "diff": {"before": "", "after": "x\n"}}
    other = {"changed": False, "diff": {"before": "", "after": "y\n"}}
    found = diff_of(results=[one, other])
    assert "+x" in found
    assert "y" not in "".join(found)


def test_diff_of_a_censored_task_is_empty() -> None:
    assert diff_of(censored="hidden", diff=[{"before": "", "after": "the key\n"}]) == []


def test_long_diff_is_truncated() -> None:
    found = diff_of(diff={"before": "", "after": "line\n" * 1000})
    assert found[-1].startswith("... and ")
    assert len(found) < 250


class Notes(Reporter, list[str]):
    """A reporter that keeps the notes."""

    def note(self, text: str) -> None:
        self.append(text)


def test_note_of_a_host_is_shown_although_the_removal_fails_on_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next `down` skips the host, so that nobody would hear the note again."""

    def playbook(_: object) -> Iterator[TaskResult]:
        found = result_of(event(CTL, kind="changed", clusterctl_notes=["/home/ada stays"]))
        assert found is not None
        yield found
        raise ConfigureError("the connection was lost")

    monkeypatch.setattr(ansible, "run_playbook", playbook)
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    workspace.create_secrets()
    notes = Notes()
    with pytest.raises(ConfigureError):
        ansible.remove_from(INVENTORY, [CTL], workspace, notes)
    (note,) = notes
    assert CTL in note
    assert "/home/ada" in note
