"""What Terraform says with -json, a JSON object a line: diagnostics, and steps as lines of progress."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.util.progress import LineReporter

Event = Mapping[str, Any]


_DOING: Final = {"create": "creating", "update": "changing", "delete": "deleting", "read": "reading"}
_DONE: Final = {"create": "created", "update": "changed", "delete": "deleted", "read": "read"}
_NAMED_AT_ONCE: Final = 3
_NOISE: Final = frozenset({"execution halted"})
_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
_FRAME: Final = re.compile(r"^[╷│╵|] ?", re.MULTILINE)
_SOURCE: Final = re.compile(r"^\s*(with \S+,|on \S+ line \d+.*)$|^\s*\d+: .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resource:
    """An address, such as ``module.nodes.google_compute_instance.node["demo-train-1"]``, and its parts."""

    address: str
    type: str
    name: str
    key: str | int | None = None

    @classmethod
    def of(cls, raw: Event) -> Resource:
        """The ``resource`` of an event."""
        return cls(raw["addr"], raw["resource_type"], raw["resource_name"], raw.get("resource_key"))

    def __str__(self) -> str:
        """What a person calls it: a host by its name."""
        return self.key if isinstance(self.key, str) else f"{self.type} {self.name}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error or a warning of Terraform, or of a provider; ``address`` is empty where it has none."""

    severity: str
    summary: str
    detail: str = ""
    address: str = ""

    @classmethod
    def of(cls, raw: Event) -> Diagnostic:
        """The ``diagnostic`` of an event, or one of ``validate -json``. Snippets of the module are left."""
        return cls(raw["severity"], raw["summary"], raw.get("detail") or "", raw.get("address") or "")

    @property
    def text(self) -> str:
        """Summary and detail."""
        return f"{self.summary}: {self.detail}" if self.detail else self.summary


def parse(line: str) -> Event | None:
    """The event of a line; None where it is none, as what a crash leaves."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def errors(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The errors, each once, without those that only say that there were others."""
    failed = dict.fromkeys(d for d in found if d.severity == "error")
    return tuple(d for d in failed if d.summary not in _NOISE) or tuple(failed)


def printed(text: str, *, code: int) -> tuple[Diagnostic, ...]:
    """The errors that were printed for people, as by ``init``; else the end of the text, as by a crash."""
    plain = _FRAME.sub("", _COLOR.sub("", text))
    blocks = re.split(r"^(?=Error: |Warning: )", plain, flags=re.MULTILINE)
    found = tuple(_of_block(block) for block in blocks if block.startswith("Error: "))
    return found or (Diagnostic("error", f"Terraform ended with exit code {code}", plain.strip()[-2000:]),)


def _of_block(block: str) -> Diagnostic:
    summary, _, rest = block.removeprefix("Error: ").partition("\n")
    paragraphs = re.split(r"\n\s*\n", _SOURCE.sub("", rest))
    detail = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())
    return Diagnostic("error", summary.strip(), detail)


class Progress:
    """Turns events into lines: each that begins and ends, and all that are under way every ten seconds.

    ``names`` says what a person calls a resource; empty where it is not worth a word.
    """

    def __init__(self, report: LineReporter, names: Callable[[Resource], str] = str) -> None:
        self._say = report
        self._names = names
        self._busy: dict[str, tuple[str, str]] = {}  # address -> name, what is done to it; the oldest first

    def take(self, event: Event) -> None:
        """Say what it means, if it means anything to a person."""
        hook = event.get("hook")
        if not isinstance(hook, Mapping) or "action" not in hook:
            return
        resource, action = Resource.of(hook["resource"]), str(hook["action"])
        if not (name := self._names(resource)):
            return
        elapsed_s = int(hook.get("elapsed_seconds") or 0)
        match event.get("type"):
            case "apply_start":
                self._busy[resource.address] = (name, _DOING.get(action, action))
                self._say(f"{name}: {_DOING.get(action, action)}…")
            case "apply_progress" if resource.address == next(iter(self._busy), None):
                for line in self._under_way():
                    self._say(f"{line}… {elapsed_s} s")
            case "apply_complete":
                self._busy.pop(resource.address, None)
                self._say(f"{name}: {_DONE.get(action, action)} after {elapsed_s} s")
            case "apply_errored":
                self._busy.pop(resource.address, None)
                self._say(f"{name}: failed after {elapsed_s} s")

    def _under_way(self) -> Iterator[str]:
        by_action: dict[str, list[str]] = {}
        for name, doing in self._busy.values():
            by_action.setdefault(doing, []).append(name)
        for doing, names in by_action.items():
            more = len(names) - _NAMED_AT_ONCE
            some = ", ".join(names[:_NAMED_AT_ONCE]) + (f" and {more} more" if more > 0 else "")
            yield f"{some}: {doing}"
