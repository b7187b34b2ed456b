"""What a playbook run tells: typed results, a recap, and one failure a host."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from clusterctl.errors import Failure
from clusterctl.hosts.roles import role_hint
from clusterctl.util.progress import HostStep

_TAIL = 1500  # characters of a module's own words that are shown

Event = Mapping[str, Any]


class Status(StrEnum):
    OK = "ok"
    CHANGED = "changed"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class TaskResult(HostStep):
    """A task ended on a host; ``how`` is its ``Status``.

    diff: a unified one of what check mode would change; of secrets there is none.
    """

    diff: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.task}"


@dataclass(frozen=True, slots=True)
class Recap:
    """The end of a run that went well: how many tasks there were, and changed something, on which host.

    ``notes``: what modules want the user to know, by host.
    """

    ok: Mapping[str, int]
    changed: int
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{sum(self.ok.values())} tasks on {len(self.ok)} hosts, {self.changed} changed"


def result_of(event: Event, hosts: Mapping[str, Collection[str]]) -> TaskResult | None:
    """The result that an event of ansible-runner means, or None.

    hosts: those that the playbook runs on, each with its groups.
    """
    ended = event["event"].removeprefix("runner_on_")
    data = event.get("event_data", {})
    if ended not in ("ok", "failed", "unreachable") or data.get("ignore_errors"):
        return None
    status, result = Status(ended), data.get("res", {})
    if status is Status.OK and result.get("changed"):
        status = Status.CHANGED
    groups = {*data.get("play_pattern", "all").split(":")}
    # A group clusterctl_* has all hosts, or none.
    every = any(group == "all" or group.startswith("clusterctl_") for group in groups)
    of = len([host for host, roles in hosts.items() if every or not groups.isdisjoint(roles)])
    diff = "\n".join(_diffs(result)) if status is Status.CHANGED else ""
    failed = status in {Status.FAILED, Status.UNREACHABLE}
    return TaskResult(data["host"], _titled(data, ": "), of, status, failed, diff)


def _titled(data: Mapping[str, Any], separator: str) -> str:
    """The task behind its role, if it is of a role."""
    return separator.join(filter(None, (data.get("role"), data["task"])))


def failures_of(events: Iterable[Event]) -> tuple[Failure, ...]:
    """One failure a host: its first, since what follows is a consequence."""
    found: dict[str, Failure] = {}
    for event in events:
        task = result_of(event, {})
        if task is None or not task.failed:
            continue
        data, unreachable = event["event_data"], task.how == Status.UNREACHABLE
        failure = Failure(
            code="unreachable" if unreachable else "configure",
            cause=_cause(data.get("res", {})),
            host=task.host,
            phase=_titled(data, " / "),
            fix="see that the host is up" if unreachable else role_hint(data.get("role", "")),
            retryable=unreachable,
        )
        found.setdefault(task.host, failure)
    return tuple(found.values())


def _cause(result: Mapping[str, Any]) -> str:
    """What the module said: its message, and the end of what its command printed."""
    items = [r for r in result.get("results", ()) if isinstance(r, dict)]
    items = [r for r in items if r.get("failed") or r.get("unreachable")]
    if items:
        return _cause(items[0])
    parts = [result.get("censored") or result.get("msg") or ""]
    parts += [result.get(key) or "" for key in ("module_stderr", "stderr", "stdout")]
    said: list[str] = []
    for part in (str(part).strip() for part in parts):
        if part and not any(part in before for before in said):
            said.append(part)
    return "\n".join(said)[-_TAIL:] or "the task failed and gave no reason"


_MOST_LINES = 200  # of one difference


def _diffs(result: Mapping[str, Any]) -> Iterator[str]:
    if result.get("censored") or result.get("_ansible_no_log"):
        return
    for item in result.get("results", ()):
        if isinstance(item, Mapping) and item.get("changed"):
            yield from _diffs(item)
    found = result.get("diff") or ()
    for one in found if isinstance(found, list | tuple) else [found]:
        if text := _text(one):
            yield text


def _text(one: Mapping[str, Any]) -> str:
    if prepared := str(one.get("prepared", "")).strip():
        return prepared
    before, after = (str(one.get(key) or "") for key in ("before", "after"))
    if not (isinstance(one.get("before"), str) or isinstance(one.get("after"), str)):
        return ""  # modes and owners, as Ansible's own structures
    old, new = (str(one.get(f"{key}_header") or key) for key in ("before", "after"))
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm="")]
    more = [f"... and {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
    return "\n".join([*lines[:_MOST_LINES], *more])
