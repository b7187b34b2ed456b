"""Parses the events of Ansible: the results of tasks, the summary of a playbook, failures of hosts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from clusterctl.errors import Failure
from clusterctl.hosts.roles import role_hint
from clusterctl.util.numbers import counted
from clusterctl.util.progress import HostStep

# dnf's error if it can't read the index of a repository (RepoError, dnf/repo.py).
_REPOSITORY: Final = re.compile(
    r"^(?:Error: )?Failed to download metadata for repo '([^']+)'", re.MULTILINE
)
# Maximum length of a module's message in an error.
_TAIL = 1500

# Begins the last line of a message of our roles and modules, which says what to do.
_FIX: Final = "\nfix: "

# See ansible/callback_plugins/clusterctl_events.py.
Event = Mapping[str, Any]
# Mitogen also asks the user to file a bug. The second text alone is of a failed task.
_DISCONNECTED: Final = ("Mitogen was disconnected", "respondent Context has disconnected")


class TaskStatus(StrEnum):
    OK = "ok"
    CHANGED = "changed"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class TaskResult(HostStep):
    """The result of an Ansible task on a host. ``how``: whether the task changed the host, failed,
    and so on.

    diff: unified diff of the changes that check mode reports. "" for tasks with secrets.
    notes: messages of the task's module for the user.
    """

    diff: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.host}: {self.task}"


@dataclass(frozen=True, slots=True)
class Recap:
    """The summary of a successful playbook run.

    ok: host -> number of tasks. changed: number of tasks that changed something, on all hosts.
    """

    ok: Mapping[str, int]
    changed: int

    def __str__(self) -> str:
        hosts = counted(len(self.ok), "host")
        return f"{counted(sum(self.ok.values()), 'task')} on {hosts}, {self.changed} changed"


def result_of(event: Event) -> TaskResult | None:
    """Return the task result that an event reports, if any."""
    if event["event"] not in set(TaskStatus):
        return None
    status = TaskStatus(event["event"])
    diff = "\n".join(_diffs(event["result"])) if status is TaskStatus.CHANGED else ""
    failed = status in {TaskStatus.FAILED, TaskStatus.UNREACHABLE}
    notes = tuple(event["result"].get("clusterctl_notes", ()))
    name = _task_name(event, ": ")
    return TaskResult(event["host"], name, event["of"], status, failed, diff, notes)


def _task_name(event: Event, separator: str) -> str:
    return separator.join(filter(None, (event["role"], event["task"])))


def failures_of(events: Iterable[Event]) -> tuple[Failure, ...]:
    """Return the first of the failed tasks of each host as a Failure. Later failures of a host are
    consequences.
    """
    failures: dict[str, Failure] = {}
    for event in events:
        failures.setdefault(event["host"], _failure(event))
    return tuple(failures.values())


def _failure(event: Event) -> Failure:
    cause = _cause(event["result"])
    where = (event["host"], _task_name(event, " / "))
    is_lost = any(words in cause for words in _DISCONNECTED)
    if is_lost or event["event"] == TaskStatus.UNREACHABLE:
        if is_lost:
            cause = "the connection was lost during this task"
        return Failure("unreachable", cause, *where, "check that the host is up", retryable=True)
    if match := _REPOSITORY.search(cause):
        fix = (
            f"make `sudo dnf makecache --repo={match[1]}` work on the host, or disable the "
            "repository"
        )
        return Failure("unreachable", cause, *where, fix, about="repository")
    cause, _, fix = cause.partition(_FIX)
    return Failure("configure-failed", cause, *where, fix or role_hint(event["role"]))


def _cause(result: Mapping[str, Any]) -> str:
    items = [r for r in result.get("results", ()) if isinstance(r, dict)]
    items = [r for r in items if r.get("failed") or r.get("unreachable")]
    if items:
        return _cause(items[0])
    parts = [result.get("censored") or result.get("msg") or ""]
    parts += [result.get(key) or "" for key in ("module_stderr", "stderr", "stdout")]
    shown: list[str] = []
    for part in (str(part).strip() for part in parts):
        if part and not any(part in text for text in shown):
            shown.append(part)
    return "\n".join(shown)[-_TAIL:] or "the task failed and gave no reason"


# Maximum number of lines of a diff.
_MOST_LINES = 200


def _diffs(result: Mapping[str, Any]) -> Iterator[str]:
    if result.get("censored") or result.get("_ansible_no_log"):
        return
    for item in result.get("results", ()):
        if isinstance(item, Mapping) and item.get("changed"):
            yield from _diffs(item)
    differences = result.get("diff") or ()
    for difference in differences if isinstance(differences, list | tuple) else [differences]:
        if text := _diff_text(difference):
            yield text


def _diff_text(difference: Mapping[str, Any]) -> str:
    if prepared := str(difference.get("prepared", "")).strip():
        return prepared
    before, after = (str(difference.get(key) or "") for key in ("before", "after"))
    if not (isinstance(difference.get("before"), str) or isinstance(difference.get("after"), str)):
        # Ansible reports changes of modes and owners as dicts.
        return ""
    old, new = (str(difference.get(f"{key}_header") or key) for key in ("before", "after"))
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm="")]
    omitted = (
        [f"... and {counted(len(lines) - _MOST_LINES, 'more line')}"]
        if len(lines) > _MOST_LINES
        else []
    )
    return "\n".join([*lines[:_MOST_LINES], *omitted])
