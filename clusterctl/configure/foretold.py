"""What Ansible says that it would change, in check mode: by host and task, with the lines of files."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clusterctl.configure.events import Event, Status, progress_of

_MOST_LINES = 200  # of one difference


@dataclass(frozen=True, slots=True)
class Foretold:
    """A task that would change a host. ``diff`` is a unified one; of secrets there is none."""

    host: str
    task: str
    diff: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.task}"


def foretold_of(event: Event) -> Foretold | None:
    """What an event of a run in check mode foretells, or None."""
    progress = progress_of(event)
    if progress is None or progress.status is not Status.CHANGED:
        return None
    result = event["event_data"].get("res", {})
    return Foretold(progress.host, progress.what, "\n".join(_diffs(result)))


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
